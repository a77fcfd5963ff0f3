"""Compile case: one way to compile one kernel.

An operation lists its cases in `compile_cases()` of its `kernel.py`, so that the report shows every variant that it may
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileCase:
    """`kernel` with its argument types in Triton's notation ("*bf16", "i32", "fp32") and its constants."""

    name: str  # variant name, unique within an operation
    kernel: Any  # triton.JITFunction, which is untyped
    signature: dict[str, str]  # all non-constant arguments
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    only: tuple[str, ...] = ()  # names of the targets it is for; empty: all
    least_shared_bytes: int = 0  # shared memory of its loads on NVIDIA, if the compiler pipelines them as intended
    unaligned: frozenset[str] = field(default_factory=frozenset)  # arguments that need not be multiples of 16


def covering_cases(cases: Sequence[CompileCase]) -> list[CompileCase]:
    """Return cases in which each kernel has each argument type, constant, number of warps and number of stages of
    `cases` at least once. The other cases are further combinations of these.

    It is a greedy set cover: the next case is always the one with the most values that are not covered.
    """
    values = {
        case.name: {
            (id(case.kernel), name, repr(value))
            for name, value in (case.signature | case.constants | {"warps": case.num_warps}).items()
        }
        | {(id(case.kernel), "stages", repr(case.num_stages))}
        for case in cases
    }
    missing = set().union(*values.values())
    chosen: set[str] = set()
    while missing:
        best = max(values, key=lambda name: len(values[name] & missing))
        missing -= values[best]
        chosen.add(best)
    return [case for case in cases if case.name in chosen]
