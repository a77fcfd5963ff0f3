"""Benefit of `--expert-batching`: expert bytes a token, tokens a second and waiting times, with it and without it.

    python benchmarks/expert_batching.py [--rounds 4] [--steps 100]

Two loops run the same streams, one with the option. One stream of the best rank comes while the others run. Its TPOT
leaves room for about half of them in a step, so that these take turns; the option chooses among them. No stream ends:
while the best rank is in use, the policy lets no more requests join than a step takes, so that requests that come
later leave no choice. The scheduler runs in virtual time, in which a step takes a millisecond per row, so that
choices and bytes do not depend on the machine; only the times of steps do. The speed is that of one loop that
switches the option on and off, since two loops differ in the placement of their memory; beside other load on the
machine, the processor time of a token says more than tokens per second. The models are the demo
model, on its tasks, and a random Qwen3-MoE with 60 experts and top-4, on random prompts. The streams are those of four
tenants in turn; with the demo model, each tenant has tasks of two domains.

The routing of all streams is recorded first, without the option, to tell how much any choice could save: the bytes of
a step with half of the streams, chosen at random, by the predicted experts, and by the actual experts, which nobody
knows in advance; and those of all streams in one step, beside two steps of half of them each.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from core_requests import batch_request
from on_checkpoint import loaded_run, make_parser, write_report
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.quantize.quality import demo_evaluation_set
from moiety_engine.scheduling.policies.moiety.expert_batching import choose_by_experts, union_of
from moiety_engine.scheduling.policies.moiety.moiety import Moiety
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.startup import load_loop
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.messages import Sampling

STREAMS = (8, 16, 32, 64)
ROW_S = 0.001  # of virtual time
OUTPUT = 900  # tokens of a stream: none ends during the measurement
RECORDED_STEPS = 60
NUM_TENANTS = 4
DECODE_PART = Tuning().decode_part


@dataclass
class Model:
    """A model with the prompts of its streams."""

    name: str
    folder: Path
    prompts: list[list[int]]  # of the tenants in turn


class VirtualClock:
    """A clock that moves a little with each reading, and otherwise by hand."""

    def __init__(self) -> None:
        self.now_s = 1.8e9

    def __call__(self) -> int:
        self.now_s += ROW_S / 100
        return int(self.now_s * 1e9)


@dataclass
class Figures:
    """Figures of one arm in its measured steps."""

    steps_s: list[float] = field(default_factory=list)  # wall-clock time
    steps_cpu_s: list[float] = field(default_factory=list)  # of all threads
    tokens: int = 0
    read_bytes: int = 0
    rows: list[int] = field(default_factory=list)
    times_s: dict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )  # virtual, of tokens, by stream's key


class Arm:
    """The loop with a constant number of streams, whose answers go on past their end."""

    def __init__(self, model: Model, num_streams: int, threads: int) -> None:
        config = EngineConfig(
            model=str(model.folder),
            name=model.name,
            num_threads=threads,
            max_running=80,
            kv_memory_bytes=1 << 28,
            prefix_caching=False,
            overlap=Overlap.OFF,
            expert_batching=True,
        )
        self._clock = VirtualClock()
        self.loop: EngineLoop = load_loop(config, clock_ns=self._clock)
        self.loop.warm_up()
        self._model, self._keys = model, itertools.count()
        self.best_keys: set[int] = set()
        for _ in range(num_streams):
            self._submit()
        while len(self.loop.scheduler.queues.decoding) < num_streams:
            self.step()

    def _submit(self, service: ServiceClass | None = None) -> None:
        key = next(self._keys)
        prompt = self._model.prompts[key % len(self._model.prompts)]
        request = batch_request(key, prompt, OUTPUT, Sampling(temperature=1.0, seed=key))
        request = msgspec.structs.replace(request, tenant_id=f"tenant-{key % NUM_TENANTS}")
        if service is not None:
            request = msgspec.structs.replace(request, service=service, tenant_id="best")
            self.best_keys.add(key)
        self.loop.submit(request)

    def batch_experts(self, *, enabled: bool) -> None:
        """Switch the option on or off."""
        policy = self.loop.scheduler.policy
        assert isinstance(policy, Moiety)
        policy.set_expert_batching(enabled)

    def add_best(self, service: ServiceClass) -> None:
        """Submit the stream of the best rank."""
        self._submit(service)

    def step(self, figures: Figures | None = None) -> None:
        self.loop.scheduler.step_time.coefficients = [0.0, 100 * ROW_S, *[0.0] * 5]  # steps have trained it
        begun_s, read = self._clock.now_s, self.loop.experts.meter.read_bytes_total
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        self.loop.step()
        took_s, took_cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        step = self.loop.take_outputs()
        outputs = [] if step is None else step.outputs
        tokens = sum(len(output.token_ids) for output in outputs)
        self._clock.now_s = max(self._clock.now_s, begun_s + ROW_S * max(1, tokens))
        if figures is not None:
            figures.steps_s.append(took_s)
            figures.steps_cpu_s.append(took_cpu_s)
            figures.tokens += tokens
            figures.rows.append(tokens)
            figures.read_bytes += self.loop.experts.meter.read_bytes_total - read
            for output in outputs:
                if output.token_ids:
                    figures.times_s[output.key].append(self._clock.now_s)
        assert all(output.finish is None for output in outputs), "a stream has ended"


def main() -> None:
    parser = make_parser(__doc__, "expert_batching.json")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100, help="steps of each arm in a round")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = loaded_run(options) | {"models": {}}
    for model in (demo(), random_model(options.work / "qwen3-moe-60-experts")):
        report["models"][model.name] = {str(count): measure(model, count, options) for count in STREAMS}
    report |= {"cost_us": choice_costs()}
    write_report(report, options.output)


def demo() -> Model:
    folder = resolve_checkpoint("")
    data = demo_evaluation_set(folder, 40)
    prompts, size = [prompt for prompt, _ in data.questions], len(data.questions) // NUM_TENANTS
    by_tenant = [random.Random(0).sample(prompts[n * size : (n + 1) * size], size) for n in range(NUM_TENANTS)]
    return Model("moiety-demo", folder, [prompt for turn in zip(*by_tenant, strict=True) for prompt in turn])


def random_model(folder: Path) -> Model:
    """Return the random checkpoint, written at the first call; its weights depend on the seed 0 only."""
    vocabulary = 4000
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=vocabulary,
            hidden_size=512,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=256,
            norm_topk_prob=True,
            max_position_embeddings=2048,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    rng = random.Random(0)
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.randint(8, 32))] for _ in range(200)]
    return Model("random, 60 experts", folder, prompts)


def measure(model: Model, num_streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return bytes and waiting times of two loops, one with the option, and the speed of one that switches it."""
    arms = {name: Arm(model, num_streams, options.threads) for name in ("off", "on")}
    routings = [record_routing(arm, num_streams) for arm in arms.values()]  # of both, so that they stay alike
    recorded = routings[0]
    tpot_s = ROW_S * (num_streams // 2 + 1) / DECODE_PART  # room for the best stream and half of the others
    service = ServiceClass("best", 0, ttft_s=600.0, tpot_s=tpot_s, on_overload=OverloadAction.QUEUE)
    told = {}
    for name, arm in arms.items():
        arm.batch_experts(enabled=name == "on")
        arm.add_best(service)
        for _ in range(20):
            arm.step()
        figures = Figures()
        for _ in range(options.steps):
            arm.step(figures)
        told[name] = summarize(figures, arm)
    arms["off"].loop.close()
    arm, speeds, cpu = arms["on"], [], []
    for number in range(options.rounds):
        round_ = {}
        for name in sorted(told, reverse=bool(number % 2)):
            arm.batch_experts(enabled=name == "on")
            round_[name] = Figures()
            for _ in range(options.steps // 4):
                arm.step(round_[name])
        on, off = round_["on"], round_["off"]
        speeds.append(_per_token(off, off.steps_s) / _per_token(on, on.steps_s))
        cpu.append(_per_token(on, on.steps_cpu_s) / _per_token(off, off.steps_cpu_s))
    result = {
        "virtual_tpot_ms_of_best": tpot_s * 1e3,
        **told,
        "bytes_per_token_ratio": told["on"]["bytes_per_token"] / told["off"]["bytes_per_token"],
        "tokens_per_s_ratio": statistics.median(speeds),
        "tokens_per_s_ratio_of_rounds": [round(speed, 3) for speed in speeds],
        "cpu_per_token_ratio": statistics.median(cpu),
        "cpu_per_token_ratio_of_rounds": [round(one, 3) for one in cpu],
        "recorded": recorded,
        "environment": environment(arm.loop),
    }
    arm.loop.close()
    print(model.name, num_streams, {name: result[name] for name in result if name.endswith("_ratio")})
    print("  ", recorded, told)
    return result


def _per_token(figures: Figures, times_s: list[float]) -> float:
    """Return the median time of a step divided by the tokens of a step."""
    return statistics.median(times_s) / (figures.tokens / len(times_s))


def summarize(figures: Figures, arm: Arm) -> dict[str, Any]:
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for key, times_s in figures.times_s.items():
        gaps[key in arm.best_keys] += [b - a for a, b in itertools.pairwise(times_s)]
    others, counts = sorted(gaps[False]), list[int]()
    tenants = [0] * NUM_TENANTS
    for key, times_s in figures.times_s.items():
        if key not in arm.best_keys:
            counts.append(len(times_s))
            tenants[key % NUM_TENANTS] += len(times_s)
    return {
        "bytes_per_token": figures.read_bytes / figures.tokens,
        "tokens_per_step": figures.tokens / len(figures.steps_s),
        "best_virtual_gap_longest_ms": 1e3 * max(gaps[True]),
        "other_virtual_gap_p50_ms": 1e3 * statistics.median(others),
        "other_virtual_gap_p99_ms": 1e3 * others[int(0.99 * len(others))],
        "other_virtual_gap_longest_ms": 1e3 * others[-1],
        "tokens_of_other_streams": [min(counts), max(counts)],
        "tokens_of_tenants": tenants,
    }


def record_routing(arm: Arm, num_streams: int) -> dict[str, float]:
    """Return experts a token and layer in steps of all and of half of the streams, and how well they are predicted."""
    shape = arm.loop.executor.model.experts
    assert shape is not None
    picks, rng = shape.top_k * len(shape.layers), random.Random(0)
    sums: dict[str, list[float]] = defaultdict(list)
    before: dict[int, int] = {}
    for _ in range(RECORDED_STEPS):
        arm.step()
        now = {one.key: one.experts.predicted for one in arm.loop.scheduler.queues.decoding}
        keys = [key for key in now if key in before]
        if len(keys) >= 2:
            half = len(keys) // 2
            predicted, actual = [before[key] for key in keys], [now[key] for key in keys]
            sums["repeated"].append(
                statistics.mean((a & b).bit_count() / picks for a, b in zip(predicted, actual, strict=True))
            )
            chosen = {
                "random": sorted(rng.sample(range(len(keys)), half)),
                "predicted": choose_by_experts(0, predicted, half),
                "actual": choose_by_experts(0, actual, half),
            }
            layers = len(shape.layers)
            sums["all"].append(union_of(actual).bit_count() / layers / len(keys))
            for name, places in chosen.items():
                sums[f"half_{name}"].append(union_of(actual[p] for p in places).bit_count() / layers / half)
            rest = [p for p in range(len(keys)) if p not in set(chosen["predicted"])]
            both = sum(union_of(actual[p] for p in part).bit_count() for part in (chosen["predicted"], rest))
            sums["two_groups_predicted"].append(both / layers / len(keys))
        before = now
    return {name: round(statistics.mean(values), 4) for name, values in sums.items()} | {
        "repeated_by_chance": round(shape.top_k / shape.num_experts, 4),
        "num_streams": num_streams,
    }


def choice_costs() -> dict[str, float]:
    """Return the time of a choice of half of the candidates, in µs, by candidates, layers and experts."""
    found, rng = {}, random.Random(0)
    for count, layers, experts, top_k in ((32, 4, 16, 2), (64, 24, 60, 4), (256, 24, 60, 4), (256, 58, 256, 8)):
        candidates = [
            union_of(1 << (layer * 64 * -(-experts // 64) + e) for layer in range(layers)
                     for e in rng.sample(range(experts), top_k))
            for _ in range(count)
        ]  # fmt: skip
        took = []
        for _ in range(30):
            begin_s = time.perf_counter()
            choose_by_experts(candidates[0], candidates[1:], count // 2)
            took.append(time.perf_counter() - begin_s)
        found[f"{count} of {layers} layers x {experts}, top {top_k}"] = round(statistics.median(took) * 1e6, 1)
    return found


if __name__ == "__main__":
    main()
