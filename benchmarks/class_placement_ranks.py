"""Placement of expert replicas by class on real ranks; a part of `class_placement.py`.

A random Qwen3-MoE, the routers of which prefer other experts for the tokens of each class. Ranks in processes of one
thread, over gloo, divide the experts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file, save_file

from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_kernels.environment import describe_environment
from moiety_placement.placement_table import sum_by_rank
from moiety_placement.replicas import concentrate, spread
from moiety_wire.classes import BATCH, PRIORITY, ServiceClass
from moiety_wire.engine_choices import RebalanceMode
from moiety_wire.messages import Sampling

WEIGHTS = (1, 4, 16)
EVERY_S = 10_000.0  # of the loop's clock, which is advanced by hand: one rebalancing, when the load is known
VOCABULARY = 512  # the first half are the best class's tokens
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
OWN, PREFERENCE = 24.0, 1.0  # length of a class's direction in embeddings; spread of its experts' logits
BEST_STREAMS, OTHER_STREAMS = 16, 48
MIXED_TOKENS, STEPS = 48, 48  # of a stream: before the rebalancing, and measured
PROMPT_TOKENS, PROMPTS, PROMPT_STEPS = 64, 8, 12  # of the best class, in a step each
RIDGE_ROWS = 16  # rows of an expert from which a rank is bound by arithmetic: the engine then balances rows


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each number of ranks and weight: medians over the checkpoints, alternating."""
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="moiety-classes-") as work:
        for seed in range(options.seeds):
            folder = make_checkpoint(Path(work) / str(seed), seed)
            for ranks in options.ranks:
                for weight in WEIGHTS:
                    rounds.append({"ranks": ranks, "weight": weight, "seed": seed} | figures(folder, ranks, weight))
                    print(json.dumps(rounds[-1]), flush=True)
    names = [name for name in rounds[0] if name not in ("ranks", "weight", "seed")]
    medians = [
        {"ranks": ranks, "weight": weight}
        | {name: round(statistics.median(one[name] for one in ours), 3) for name in names}
        for ranks in options.ranks
        for weight in WEIGHTS
        if (ours := [one for one in rounds if (one["ranks"], one["weight"]) == (ranks, weight)])
    ]
    return {"environment": describe_environment("numpy", "torch"), "cases": medians, "rounds": rounds}


def make_checkpoint(folder: Path, seed: int) -> Path:
    """Write a model that answers with tokens of the prompt's class and prefers experts by class."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen3_moe", **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    embedding_VD = torch.randn(VOCABULARY, SHAPE["hidden_size"])
    embedding_VD[:, :2] = 0
    embedding_VD[: VOCABULARY // 2, 0] = embedding_VD[VOCABULARY // 2 :, 1] = OWN
    weights["model.embed_tokens.weight"] = embedding_VD
    part = OWN / (OWN**2 + SHAPE["hidden_size"]) ** 0.5 * SHAPE["hidden_size"] ** 0.5  # of a normed token
    for layer in range(SHAPE["num_hidden_layers"]):
        router_ED = torch.randn(SHAPE["num_experts"], SHAPE["hidden_size"]) / SHAPE["hidden_size"] ** 0.5
        router_ED[:, :2] = PREFERENCE * torch.randn(SHAPE["num_experts"], 2) / part
        weights[f"model.layers.{layer}.mlp.gate.weight"] = router_ED
    save_file(weights, path, {"format": "pt"})
    return folder


def figures(folder: Path, ranks: int, weight: int) -> dict[str, float]:
    """Return the figures of steps of the best class alone and of both classes, after one rebalancing."""
    ahead_ns = [0]
    config = EngineConfig(
        model=str(folder),
        name="random",
        device="cpu",
        dtype="float32",
        num_threads=1,
        tp=ranks,
        ep=ranks,
        redundant_experts=ranks,
        rebalance_every_s=EVERY_S,
        rebalance_mode=RebalanceMode.BLOCKING,
        expert_rank_weights="" if weight == 1 else f"{weight},1",
        max_running=BEST_STREAMS + OTHER_STREAMS,
        kv_memory_bytes=64 << 20,
        prefix_caching=False,
    )
    with load_loop(config, clock_ns=lambda: time.time_ns() + ahead_ns[0]) as loop:
        loop.warm_up()
        assert loop.experts.rebalancing is not None
        run_all(loop, streams(BEST_STREAMS, OTHER_STREAMS, MIXED_TOKENS))
        ahead_ns[0] += int(1e9 * EVERY_S)
        while loop.experts.rebalancing.balancer.is_moving or not loop.load().rebalances_total:
            run_all(loop, streams(BEST_STREAMS, OTHER_STREAMS, 8))
        found = {
            "best": Steps(loop).run([list(streams(BEST_STREAMS, 0, STEPS))]),
            "all": Steps(loop).run([list(streams(BEST_STREAMS, OTHER_STREAMS, STEPS))]),
            "prompts": Steps(loop).run([list(streams(PROMPTS, 0, 1, wave)) for wave in range(PROMPT_STEPS)]),
        }
    return {f"{kind}_{name}": value for kind, values in found.items() for name, value in values.items()}


def streams(num_best: int, num_others: int, num_tokens: int, wave: int = 0) -> Iterator[CoreSubmit]:
    """Yield requests whose prompts are tokens of their class; the answers are sampled."""
    for key in range(num_best + num_others):
        service: ServiceClass = PRIORITY if key < num_best else BATCH
        rng = np.random.default_rng(1000 * wave + key)
        first, num_prompt = (0 if key < num_best else VOCABULARY // 2), (PROMPT_TOKENS if num_tokens == 1 else 8)
        prompt = (first + rng.integers(VOCABULARY // 2, size=num_prompt)).tolist()
        sampling = Sampling(temperature=1.0, seed=key)
        yield CoreSubmit(
            key, f"tenant-{key}", service, prompt, sampling, num_tokens, num_tokens, [], num_tokens, b"s", 0
        )


class Steps:
    """Hook called after each step, which records times and the experts that each rank reads."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._counts: list[np.ndarray] = []  # [L, E] of each step
        self._step_ms: list[float] = []
        self._ended_s = 0.0

    def run(self, waves: list[list[CoreSubmit]]) -> dict[str, float]:
        """Run the requests, one wave after the other, and return the figures of their steps.

        Of a single wave, the first eighth of the steps is left out, which has the prompts.
        """
        assert self._loop.experts.rebalancing is not None
        placement = self._loop.experts.rebalancing.balancer.placement
        begun_s, in_class = cpu_s(), list[bool]()
        for wave in waves:
            self._ended_s = time.perf_counter()
            best = {one.key for one in wave if one.service is PRIORITY}
            for key, result in run_all(self._loop, wave, on_step=self._after_step).items():
                in_class += [(one < VOCABULARY // 2) is (key in best) for one in result.token_ids]
        spent_s = [after - before for before, after in zip(begun_s, cpu_s(), strict=True)]
        first = len(self._counts) // 8 if len(waves) == 1 else 0
        rows, experts = [], []
        for counts_LE in self._counts[first:]:
            choose = spread if counts_LE.sum(axis=1).max() >= RIDGE_ROWS * counts_LE.shape[1] else concentrate
            quota_LR = choose(placement, counts_LE)
            rows.append(sum_by_rank(quota_LR.astype(float), placement.num_ranks))
            experts.append(sum_by_rank((quota_LR > 0).astype(float), placement.num_ranks))
        rows_SLG, experts_SLG = np.stack(rows), np.stack(experts)
        popular_LE = np.sort(np.sum(self._counts, axis=0), axis=1)[:, ::-1]
        return {
            "step_ms_p50": statistics.median(self._step_ms[first:]),
            "busiest_rank_cpu_ms": 1e3 * max(spent_s) / len(self._step_ms),
            "rows_of_busiest_rank": float(rows_SLG.max(axis=2).mean()),
            "rows_of_busiest_to_mean": float(rows_SLG.max(axis=2).sum() / rows_SLG.mean(axis=2).sum()),
            "experts_read_by_busiest_rank": float(experts_SLG.max(axis=2).mean()),
            "experts_read_to_mean": float(experts_SLG.max(axis=2).sum() / experts_SLG.mean(axis=2).sum()),
            "picks_of_the_eight_most_used": float(popular_LE[:, :8].sum() / popular_LE.sum()),
            "answers_in_the_class": statistics.mean(in_class),
        }

    def _after_step(self, _: int) -> None:
        self._step_ms.append(1e3 * (time.perf_counter() - self._ended_s))
        model, num_experts = self._loop.executor.model, SHAPE["num_experts"]
        chosen = [expert_TK.flatten().numpy() for expert_TK in model._layers.chosen]
        self._counts.append(np.stack([np.bincount(picks, minlength=num_experts) for picks in chosen]))
        self._ended_s = time.perf_counter()


def cpu_s() -> list[float]:
    """Return the processor time of this process, which is rank 0, and of the other ranks."""
    own = psutil.Process()
    ranks = [own, *(one for one in own.children() if "moiety_engine.core.worker" in one.cmdline())]
    return [times.user + times.system for times in (one.cpu_times() for one in ranks)]
