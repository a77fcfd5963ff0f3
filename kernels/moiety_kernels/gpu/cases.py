"""One way of compiling one kernel: what an operation lists in `compile_cases()` of its `kernel.py`, so that the report
shows every variant that it may launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CompileCase:
    """`kernel` with the types of its arguments as Triton writes them ("*bf16", "i32", "fp32") and its constants."""

    name: str  # of the variant, unique within an operation
    kernel: Any  # triton.JITFunction, which has no types
    signature: dict[str, str]  # every argument that is not constant
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    only: tuple[str, ...] = ()  # names of targets it is meant for; empty: all
    least_shared_bytes: int = 0  # that its loads take on NVIDIA's, if the compiler lets them run ahead as it should
    unaligned: frozenset[str] = field(default_factory=frozenset)  # arguments that need not be multiples of 16
