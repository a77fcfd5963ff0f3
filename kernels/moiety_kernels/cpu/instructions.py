"""The instructions that kernels are written with and that not every processor has, and which of them are emulated.

A kernel for matrix tiles or for AVX-512 can so be tested on any processor: the environment variable
`MOIETY_EMULATED_INSTRUCTIONS` names features, as LLVM calls them and with commas between them, whose instructions are
then written out, whether the processor has them or not. What is computed is what Intel's reference says of the
instruction (Architecture Instruction Set Extensions, AMX and AVX512-BF16), denormal numbers included; it takes many
times as long, and is not for serving.
"""

from __future__ import annotations

import os

import llvmlite.binding as llvm
from numba.core.registry import cpu_target

VARIABLE = "MOIETY_EMULATED_INSTRUCTIONS"
TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE = "amx-bf16", "avx512bf16", "avx512bw"  # what may be emulated
EMULATED = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
_KNOWN = frozenset({TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE})
if not EMULATED <= _KNOWN:
    raise ValueError(f"{VARIABLE} is {','.join(sorted(EMULATED))!r}; it takes some of {','.join(sorted(_KNOWN))}")
_HOST = frozenset(
    # What numba compiles for; its settings may say less than the processor has.
    one[1:]
    for one in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if one.startswith("+")
)
FEATURES = _HOST | EMULATED | ({"amx-tile"} if TILES_FEATURE in EMULATED else frozenset())
WIDE = bool(llvm.get_host_cpu_features().get("avx512f")) or bool(EMULATED)  # 16 floats a vector, of two if need be
