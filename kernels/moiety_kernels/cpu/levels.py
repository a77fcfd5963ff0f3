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
    has_slow_pairs: bool = False  # products of bfloat16 in pairs take longer than those of float32

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
    "avx512bf16-slow": CpuLevel("x86-64-v4", _BF16, has_slow_pairs=True),
    "amx": CpuLevel("x86-64-v4", _BF16 | {"amx-tile", "amx-bf16", "amx-int8"}),
}
OPTIONAL_FEATURES = frozenset().union(*(level.features for level in X86_LEVELS.values())) - _AVX2


def best_level(features: Set[str], limit: str = "", *, has_slow_pairs: bool = False) -> str:
    """Return the level with the most features among those of a CPU; "" if the CPU has not even AVX2.

    `limit` names a level whose features are not exceeded; it is returned if the CPU has its features.
    """
    if limit and X86_LEVELS[limit].features <= features:
        return limit
    usable = features & X86_LEVELS[limit].features if limit else features
    fitting = [
        name
        for name, level in X86_LEVELS.items()
        if level.features <= usable and (has_slow_pairs or not level.has_slow_pairs)
    ]
    return fitting[-1] if fitting else ""


def has_slow_pairs(cpu: str) -> bool:
    """Return whether a CPU, by its name in LLVM, multiplies pairs of bfloat16 more slowly than float32.

    A core of an Intel Xeon of the fifth generation reached 41 G products per second in pairs, and 65 G in float32. One
    of AMD's Zen 4 reached 117 G and 57 G (`docs/cpu.md`).
    """
    return not cpu.startswith("znver")
