"""Optional CPU instructions that kernels use, and the list of emulated ones.

Emulation allows tests of kernels for matrix tiles or AVX-512 on any CPU. The environment variable
`MOIETY_EMULATED_INSTRUCTIONS` names features by their LLVM names, separated by commas; their instructions are then
emulated, whether the CPU has them or not. Results follow Intel's reference for the instruction (Architecture
Instruction Set Extensions, AMX and AVX512-BF16), denormal numbers included. Emulation is many times slower and not for
serving.
"""

from __future__ import annotations

import os

import llvmlite.binding as llvm
from numba.core.registry import cpu_target

VARIABLE = "MOIETY_EMULATED_INSTRUCTIONS"
TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE = "amx-bf16", "avx512bf16", "avx512bw"  # features that can be emulated
EMULATED = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
_KNOWN = frozenset({TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE})
if not EMULATED <= _KNOWN:
    raise ValueError(f"{VARIABLE} is {','.join(sorted(EMULATED))!r}; it takes some of {','.join(sorted(_KNOWN))}")
_HOST = frozenset(
    # Target of numba's compilation; its settings may enable less than the CPU has.
    one[1:]
    for one in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if one.startswith("+")
)
FEATURES = _HOST | EMULATED | ({"amx-tile"} if TILES_FEATURE in EMULATED else frozenset())
WIDE = bool(llvm.get_host_cpu_features().get("avx512f")) or bool(EMULATED)  # 16 floats per vector
