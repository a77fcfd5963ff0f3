"""Optional CPU instructions that kernels use: those of the CPU, limited or emulated by the environment.

`MOIETY_CPU_LEVEL` limits them, so that one machine runs the kernels of CPUs that have less: `avx2` withholds AVX-512,
AVX-VNNI and AMX from the compiler and from the choice of kernels. LEVELS has all levels. `neon` is Arm's: its kernels
use no instruction of x86 by name, so that they compile for Arm, and an x86 CPU runs them as well. On Arm it withholds
the products of bfloat16 and of bytes.

Emulation allows tests of kernels for matrix tiles or AVX-512 on any CPU. The environment variable
`MOIETY_EMULATED_INSTRUCTIONS` names features by their LLVM names, separated by commas; their instructions are then
emulated, whether the CPU has them or not. Results follow Intel's reference for the instruction (Architecture
Instruction Set Extensions, AMX and AVX512-BF16), denormal numbers included. Emulation is many times slower and not for
serving.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import llvmlite.binding as llvm
from numba.core import config
from numba.core.registry import cpu_target

VARIABLE = "MOIETY_EMULATED_INSTRUCTIONS"
LEVEL_VARIABLE = "MOIETY_CPU_LEVEL"
# beginnings of the LLVM names of the features that each level withholds
LEVELS = {
    "avx2": ("avx512", "avx10", "avxvnni", "amx"),
    "avxvnni": ("avx512", "avx10", "amx"),
    "avx512": ("avx512bf16", "avx512fp16", "avx512vnni", "avx10", "avxvnni", "amx"),
    "avx512vnni": ("avx512bf16", "avx512fp16", "avx10", "amx"),
    "avx512bf16": ("avx10", "amx"),
}
ARM_LEVEL = ARM_FEATURE = "neon"
TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE = "amx-bf16", "avx512bf16", "avx512bw"  # features that can be emulated
ARM_PAIRS_FEATURE, ARM_BYTES_FEATURE = "bf16", "i8mm"  # the same of Arm; the second implies products of signed bytes
ARM_EXTENSIONS = frozenset({ARM_PAIRS_FEATURE, ARM_BYTES_FEATURE})
LEVELS[ARM_LEVEL] = (*LEVELS["avx2"], *ARM_EXTENSIONS)
EMULATED = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
LEVEL = os.environ.get(LEVEL_VARIABLE, "")
_KNOWN = frozenset({TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE}) | ARM_EXTENSIONS
if not EMULATED <= _KNOWN:
    raise ValueError(f"{VARIABLE} is {','.join(sorted(EMULATED))!r}; it takes some of {','.join(sorted(_KNOWN))}")
if LEVEL and LEVEL not in LEVELS:
    raise ValueError(f"{LEVEL_VARIABLE} is {LEVEL!r}; it takes one of {', '.join(LEVELS)}")


def _compiled_for() -> frozenset[str]:
    """Return the features of the target of numba's compilation; its settings may enable less than the CPU has."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return frozenset(one[1:] for one in features if one.startswith("+"))


def _limit_compiler(level: str) -> frozenset[str]:
    """Withhold the level's features from numba; return those that the CPU has. Must run before numba compiles."""
    features = llvm.get_host_cpu_features()
    withheld = frozenset(name for name, is_there in features.items() if is_there and name.startswith(LEVELS[level]))
    for name in withheld:
        features[name] = False
    config.CPU_FEATURES = features.flatten()  # type: ignore[attr-defined]
    if left := withheld & _compiled_for():
        raise RuntimeError(
            f"{LEVEL_VARIABLE} is {LEVEL!r}, but numba already compiles with {', '.join(sorted(left))}: "
            "import moiety_kernels before code that compiles with numba"
        )
    return withheld


def _add_arm_extensions() -> None:
    """Let numba compile for the extensions of this Arm processor that kernels use. Must run before numba compiles.

    LLVM knows them by the model of the processor, but does not list them; Linux does, by LLVM's names.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    listed = next((line.partition(":")[2].split() for line in lines if line.startswith("Features")), [])
    features = llvm.get_host_cpu_features()
    for name in ARM_EXTENSIONS.intersection(listed):
        features[name] = True
    features["dotprod"] = "asimddp" in listed
    config.CPU_FEATURES = features.flatten()  # type: ignore[attr-defined]


WITHHELD = _limit_compiler(LEVEL) if LEVEL else frozenset()  # features that the CPU has and LEVEL does not
if platform.machine() == "aarch64" and not LEVEL:
    _add_arm_extensions()
_HOST = _compiled_for()
ARM = LEVEL == ARM_LEVEL or ARM_FEATURE in _HOST  # kernels use no instruction of x86 by name
if not ARM and (further := EMULATED & ARM_EXTENSIONS):
    raise ValueError(f"{VARIABLE} names {', '.join(sorted(further))}; these need {LEVEL_VARIABLE}={ARM_LEVEL}")
_FURTHER = ({"amx-tile"} if TILES_FEATURE in EMULATED else set()) | ({ARM_FEATURE} if ARM else set())
FEATURES = _HOST | EMULATED | _FURTHER
WIDE = "avx512f" in _HOST or bool(EMULATED - ARM_EXTENSIONS)  # 16 floats per vector
