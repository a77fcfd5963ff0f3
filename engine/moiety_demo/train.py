"""Training of the demo model: Muon and AdamW, loss on answers only, checkpoints at intervals.

Knows no terminal; a callback receives the progress.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from moiety_demo.balance import balance_loss, focus_loss
from moiety_demo.batches import BatchSource, TrainingBatch
from moiety_demo.domains import DOMAINS, Split, sample_tasks
from moiety_demo.folder import load_folder, save_folder
from moiety_demo.generation import answer_prompts
from moiety_demo.muon import Muon
from moiety_demo.network import DemoNetwork, NetworkConfig
from moiety_demo.tokenizer import build_tokenizer

Optimizers = tuple[Muon, torch.optim.AdamW]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of a training run.

    With infinite `minutes`, the result depends on nothing else.

    The learning rate follows the steps done or the minutes spent, whichever is further along.
    """

    steps: int = 5_000
    minutes: float = math.inf
    seed: int = 0
    threads: int = 2
    batch_tokens: int = 3072
    learning_rate: float = 3e-3
    matrix_rate_factor: float = 2.0
    final_rate_share: float = 0.01
    warmup_steps: int = 200
    weight_decay: float = 0.1
    balance_weight: float = 0.05
    focus_weight: float = 0.05
    focus_floor: float = 0.65
    checkpoint_every: int = 1000
    check_prompts: int = 40


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """Progress of a run; `accuracy` of each domain is present only at a checkpoint."""

    step: int
    fraction: float
    loss: float
    balance: float
    focus: float
    tokens: int
    answer_tokens: int
    wall_s: float
    cpu_s: float
    accuracy: Mapping[str, float] = field(default_factory=dict)


def train(
    output_dir: Path,
    settings: TrainSettings,
    on_progress: Callable[[TrainProgress], None],
    dimensions: Mapping[str, int] | None = None,
    start: Path | None = None,
) -> TrainProgress:
    """Train a model and write its folder, at intervals and at the end; return the last progress.

    `dimensions` overrides fields of NetworkConfig. `start` is a model's folder to continue from, instead of from
    scratch. Raises DemoCheckpointError if `start` is not the folder of a demo model.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    if start is not None:
        network, tokenizer = load_folder(start)
        network.train()
    else:
        tokenizer = build_tokenizer(settings.seed)
        network = DemoNetwork(NetworkConfig(vocab_size=tokenizer.get_vocab_size(), **(dimensions or {})))
    optimizers = _optimizers(network, settings)
    batches = iter(BatchSource(tokenizer, settings.batch_tokens, settings.seed))
    wall_start, cpu_start = time.monotonic(), time.process_time()
    fraction, step, tokens, answer_tokens = 0.0, 0, 0, 0
    while True:
        rate = _learning_rate(settings, step, fraction)
        batch = next(batches)
        losses = _learn(network, optimizers, batch, settings, rate)
        step, tokens, answer_tokens = step + 1, tokens + batch.num_tokens, answer_tokens + len(batch.answer_ids)
        wall_s = time.monotonic() - wall_start
        fraction = min(1.0, max(step / settings.steps, wall_s / (60 * settings.minutes)))
        at_checkpoint = step % settings.checkpoint_every == 0 or fraction >= 1.0
        if at_checkpoint:
            save_folder(network, tokenizer, output_dir)
        progress = TrainProgress(
            step,
            fraction,
            *losses,
            tokens,
            answer_tokens,
            wall_s,
            time.process_time() - cpu_start,
            check_domains(network, tokenizer, settings.check_prompts) if at_checkpoint else {},
        )
        on_progress(progress)
        if fraction >= 1.0:
            return progress


def check_domains(network: DemoNetwork, tokenizer: Tokenizer, num_prompts: int) -> dict[str, float]:
    """Return the share of exact answers per domain, on a few held-out prompts."""
    accuracy = {}
    for domain in DOMAINS if num_prompts else ():
        tasks = list(sample_tasks(domain, Split.HELD_OUT, num_prompts, seed=1))
        answers = answer_prompts(network, tokenizer, [task.prompt for task in tasks])
        exact = sum(text == task.answer for text, task in zip(answers.texts, tasks, strict=True))
        accuracy[domain] = exact / num_prompts
    return accuracy


def _learn(
    network: DemoNetwork, optimizers: Optimizers, batch: TrainingBatch, settings: TrainSettings, rate: float
) -> tuple[float, float, float]:
    """Run one step; return the answers' mean cross-entropy, the balance loss and the focus loss."""
    muon, adam = optimizers
    muon.lr = rate * settings.matrix_rate_factor
    for group in adam.param_groups:
        group["lr"] = rate
    hidden, routings = network(batch.groups)
    answers = functional.cross_entropy(network.logits(hidden[batch.answer_at]), batch.answer_ids)
    balance = balance_loss(routings, batch.sequence_T)
    focus = focus_loss(routings, batch.sequence_T, settings.focus_floor)
    torch.autograd.backward(answers + settings.balance_weight * balance + settings.focus_weight * focus)
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    muon.step()
    adam.step()
    network.zero_grad()
    return answers.item(), balance.item(), focus.item()


def _learning_rate(settings: TrainSettings, step: int, fraction: float) -> float:
    warmup = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * fraction))
    return settings.learning_rate * warmup * (settings.final_rate_share + (1 - settings.final_rate_share) * cosine)


def _optimizers(network: DemoNetwork, settings: TrainSettings) -> Optimizers:
    """Return Muon for the matrices of attention and experts, AdamW for embeddings, norms and routers."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        (matrices if name.endswith("_proj.weight") else others).append(parameter)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return Muon(matrices, settings.weight_decay), adam
