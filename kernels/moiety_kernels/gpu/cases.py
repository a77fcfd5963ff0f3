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
    """Return cases with each kernel, argument type and flag (a constant that is a bool or a string) of `cases`.

    A type or flag counts as covered if any of the kernels has it. The other cases differ in sizes, numbers of warps and
    stages, or combine the same values. It is a greedy set cover: the next case is always the one with the most values
    that are not covered.
    """
    values = {
        case.name: {("kernel", str(id(case.kernel)))}
        | {(name, repr(value)) for name, value in case.signature.items()}
        | {(name, repr(value)) for name, value in case.constants.items() if isinstance(value, bool | str)}
        for case in cases
    }
    missing = set().union(*values.values())
    chosen: set[str] = set()
    while missing:
        best = max(values, key=lambda name: len(values[name] & missing))
        missing -= values[best]
        chosen.add(best)
    return [case for case in cases if case.name in chosen]
