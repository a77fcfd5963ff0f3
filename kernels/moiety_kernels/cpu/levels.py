"""Levels of CPU features for which kernels are compiled.

Code compiled for a level runs on every x86 CPU that has the level's features, so that one machine can compile kernels
for others. The levels AVX2 and AVX-512 are x86-64-v3 and x86-64-v4 of the x86-64 psABI.
"""

from __future__ import annotations

import platform
from collections.abc import Set
from typing import NamedTuple

IS_X86 = platform.machine() in ("x86_64", "AMD64")
LEVEL_VARIABLE = "MOIETY_CPU_LEVEL"
COMPILE_ONLY_VARIABLE = "MOIETY_COMPILE_ONLY"


class CpuLevel(NamedTuple):
    """A set of CPU features."""

    target: str  # LLVM's name of a CPU, for scheduling
    features: frozenset[str]  # LLVM's names

    @property
    def compiler_features(self) -> str:
        """Features in the notation of LLVM's target machine."""
        # kernels choose the width of their vectors, also where LLVM holds 256 bits to be faster
        return ",".join(["-prefer-256-bit", *(f"+{name}" for name in sorted(self.features))])


_AVX2 = frozenset(
    {"avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse4.2", "xsave"}
)
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512vnni"}
_BF16 = _VNNI | {"avx512bf16"}

X86_LEVELS = {  # from the fewest features to the most
    "avx2": CpuLevel("x86-64-v3", _AVX2),
    "avxvnni": CpuLevel("x86-64-v3", _AVX2 | {"avxvnni"}),
    "avx512": CpuLevel("x86-64-v4", _AVX512),
    "avx512vnni": CpuLevel("x86-64-v4", _VNNI),
    "avx512bf16": CpuLevel("x86-64-v4", _BF16),
    "amx": CpuLevel("x86-64-v4", _BF16 | {"amx-tile", "amx-bf16", "amx-int8"}),
}
OPTIONAL_FEATURES = frozenset().union(*(level.features for level in X86_LEVELS.values())) - _AVX2


def best_level(features: Set[str], limit: str = "") -> str:
    """Return the level with the most features among those of a CPU; "" if the CPU has not even AVX2.

    `limit` names a level whose features are not exceeded.
    """
    allowed = X86_LEVELS[limit].features if limit else None
    fitting = [
        name
        for name, level in X86_LEVELS.items()
        if level.features <= features and (allowed is None or level.features <= allowed)
    ]
    return fitting[-1] if fitting else ""
