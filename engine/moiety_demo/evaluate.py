"""Evaluation of a model folder: exact answers to held-out prompts, and the experts that each domain uses.

N domains, L layers, E experts.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from moiety_demo.domains import DOMAINS, Split, Task, sample_tasks
from moiety_demo.folder import WEIGHTS, load_folder
from moiety_demo.generation import answer_prompts
from moiety_demo.network import DemoNetwork

SEED_OF_EVALUATION = 1234


@dataclass(frozen=True, slots=True)
class KindResult:
    """Result of one kind of task within a domain."""

    num_prompts: int
    num_exact: int


@dataclass(frozen=True, slots=True)
class DomainResult:
    """Result of one domain.

    `expert_counts[l][e]`: number of tokens of this domain's prompts and answers that layer l sent to expert e.
    """

    num_prompts: int
    num_exact: int
    accuracy: float
    kinds: Mapping[str, KindResult]
    expert_counts: list[list[int]]
    mistakes: list[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Specialisation:
    """Information of a token's expert about its domain, per layer; domains have equal weight.

    `mutual_information_bits` is 0 when all domains use the experts equally, and at most log2 of the smaller of the
    numbers of domains and experts. `total_variation` is the mean distance of a domain's use of the experts from the
    mean use: 0 equal, 1 disjoint.
    """

    mutual_information_bits: list[float]
    total_variation: list[float]


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Result of `evaluate`; `domains` are in their fixed order."""

    environment: Mapping[str, str]
    settings: Mapping[str, str | int]
    domains: Mapping[str, DomainResult]
    specialisation: Specialisation
    num_parameters: int
    weights_bytes: int
    wall_s: float


def evaluate(
    model_dir: Path,
    per_domain: int = 200,
    seed: int = SEED_OF_EVALUATION,
    on_domain: Callable[[str], None] = lambda domain: None,
) -> EvaluationReport:
    """Answer `per_domain` distinct held-out prompts of every domain, greedily, with the stored weights.

    Raises DemoCheckpointError if `model_dir` is not a demo model.
    """
    start = time.monotonic()
    network, tokenizer = load_folder(model_dir)
    domains = {}
    for domain in DOMAINS:
        on_domain(domain)
        tasks = list(sample_tasks(domain, Split.HELD_OUT, per_domain, seed))
        domains[domain] = _evaluate_task(network, tokenizer, tasks)
    return EvaluationReport(
        environment=_environment(),
        settings={"model": str(model_dir), "per_domain": per_domain, "seed": seed},
        domains=domains,
        specialisation=measure_specialisation([result.expert_counts for result in domains.values()]),
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        weights_bytes=(model_dir / WEIGHTS).stat().st_size,
        wall_s=time.monotonic() - start,
    )


def measure_specialisation(expert_counts: list[list[list[int]]]) -> Specialisation:
    """Return the specialisation from `expert_counts` [N][L][E]; no row of experts may be all zero."""
    counts_NLE = torch.tensor(expert_counts, dtype=torch.float64)
    share_NLE = counts_NLE / counts_NLE.sum(-1, keepdim=True)
    mean_LE = share_NLE.mean(0)
    information_L = (share_NLE * (_log2(share_NLE) - _log2(mean_LE))).sum(-1).mean(0)
    distance_L = 0.5 * (share_NLE - mean_LE).abs().sum(-1).mean(0)
    return Specialisation(information_L.tolist(), distance_L.tolist())


def _evaluate_task(network: DemoNetwork, tokenizer: Tokenizer, tasks: list[Task]) -> DomainResult:
    answers = answer_prompts(network, tokenizer, [task.prompt for task in tasks])
    asked, exact = Counter[str](), Counter[str]()
    mistakes: list[Mapping[str, str]] = []
    for task, text in zip(tasks, answers.texts, strict=True):
        asked[task.kind] += 1
        exact[task.kind] += text == task.answer
        if text != task.answer:
            mistakes.append({"prompt": task.prompt, "expected": task.answer, "answered": text})
    return DomainResult(
        num_prompts=len(tasks),
        num_exact=exact.total(),
        accuracy=exact.total() / len(tasks),
        kinds={kind: KindResult(asked[kind], exact[kind]) for kind in sorted(asked)},
        expert_counts=answers.expert_counts.tolist(),
        mistakes=mistakes,
    )


def _environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "tokenizers": version("tokenizers"),
        "device": f"cpu ({torch.get_num_threads()} threads, {platform.machine()})",
    }


def _log2(share: Tensor) -> Tensor:
    """Return the logarithm of values above zero; zero elsewhere, where its weight is zero."""
    return torch.where(share > 0, share, 1.0).log2()
