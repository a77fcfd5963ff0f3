"""Task domains of the demo model: every task has one exact answer, and its split follows from its content."""

from collections.abc import Iterator, Mapping
from random import Random
from types import MappingProxyType

from moiety_demo.domains import (
    arithmetic,
    capitals,
    comparisons,
    descriptions,
    lists,
    smalltalk,
    strings,
    units,
)
from moiety_demo.domains.task import Sampler, Split, Task, split_of

__all__ = ["DOMAINS", "Sampler", "Split", "Task", "sample_tasks", "split_of"]

DOMAINS: Mapping[str, Sampler] = MappingProxyType(
    {
        module.DOMAIN: module.sample
        for module in (arithmetic, units, capitals, strings, lists, comparisons, descriptions, smalltalk)
    }
)


def sample_tasks(domain: str, split: Split, num_tasks: int, seed: int) -> Iterator[Task]:
    """Yield `num_tasks` distinct prompts of one domain; the same seed gives the same tasks.

    Raises ValueError for an unknown domain.
    """
    if domain not in DOMAINS:
        raise ValueError(f"unknown domain {domain!r}; choose one of {', '.join(DOMAINS)}")
    rng = Random(f"{domain} {split.value} {seed}")
    seen: set[str] = set()
    while len(seen) < num_tasks:
        task = DOMAINS[domain](rng, split)
        if task.prompt not in seen:
            seen.add(task.prompt)
            yield task
