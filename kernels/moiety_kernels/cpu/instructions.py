"""Optional CPU instructions that kernels use: those of the CPU, limited or emulated by the environment.

On x86 the compiler and the choice of kernels use the features of one of the levels (`levels.py`), the best that the CPU
has. `MOIETY_CPU_LEVEL` limits it, so that one machine runs the kernels of CPUs that have less. The level `neon` is
Arm's: its kernels use no instruction of x86 by name, so that they compile for Arm, and an x86 CPU runs them as well. On
Arm it withholds the products of bfloat16 and of bytes.

With `MOIETY_COMPILE_ONLY=1`, kernels are compiled for the level of `MOIETY_CPU_LEVEL`, which the CPU need not have, and
not run (`team.py`). Results are meaningless then.

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

from moiety_kernels.cpu.levels import (
    COMPILE_ONLY_VARIABLE,
    IS_X86,
    LEVEL_VARIABLE,
    OPTIONAL_FEATURES,
    X86_LEVELS,
    best_level,
    has_slow_pairs,
)

VARIABLE = "MOIETY_EMULATED_INSTRUCTIONS"
ARM_LEVEL = ARM_FEATURE = "neon"
LEVELS = (*X86_LEVELS, ARM_LEVEL)
TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE = "amx-bf16", "avx512bf16", "avx512bw"  # features that can be emulated
ARM_PAIRS_FEATURE, ARM_BYTES_FEATURE = "bf16", "i8mm"  # the same of Arm; the second implies products of signed bytes
ARM_EXTENSIONS = frozenset({ARM_PAIRS_FEATURE, ARM_BYTES_FEATURE})
EMULATED = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
LEVEL = os.environ.get(LEVEL_VARIABLE, "")
COMPILE_ONLY = os.environ.get(COMPILE_ONLY_VARIABLE, "") == "1"
_KNOWN = frozenset({TILES_FEATURE, PAIRS_FEATURE, WORDS_FEATURE}) | ARM_EXTENSIONS
if not EMULATED <= _KNOWN:
    raise ValueError(f"{VARIABLE} is {','.join(sorted(EMULATED))!r}; it takes some of {','.join(sorted(_KNOWN))}")
if LEVEL and LEVEL not in LEVELS:
    raise ValueError(f"{LEVEL_VARIABLE} is {LEVEL!r}; it takes one of {', '.join(LEVELS)}")
if COMPILE_ONLY and (LEVEL not in X86_LEVELS or not IS_X86):
    raise ValueError(f"{COMPILE_ONLY_VARIABLE} needs an x86 processor and {LEVEL_VARIABLE}={'|'.join(X86_LEVELS)}")


def _compiled_for() -> frozenset[str]:
    """Return the features of the target of numba's compilation; its settings may enable less than the CPU has."""
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return frozenset(one[1:] for one in features if one.startswith("+"))


def _compile_for(level: str) -> None:
    """Let numba compile for a level of x86. Must run before numba compiles."""
    config.CPU_NAME = X86_LEVELS[level].target  # type: ignore[attr-defined]
    config.CPU_FEATURES = X86_LEVELS[level].compiler_features  # type: ignore[attr-defined]


def _choose_level() -> str:
    """Set numba's target; return the level of x86 for which it compiles, or "" on other CPUs."""
    if not IS_X86:
        return ""
    limit = "avx2" if LEVEL == ARM_LEVEL else LEVEL
    level = limit if COMPILE_ONLY else best_level(_CPU_FEATURES, limit, has_slow_pairs=_HAS_SLOW_PAIRS)
    if level:
        _compile_for(level)
    elif LEVEL:
        missing = ", ".join(sorted(X86_LEVELS["avx2"].features - _CPU_FEATURES))
        raise ValueError(f"{LEVEL_VARIABLE} is {LEVEL!r}, but this processor has no {missing}, which all levels need")
    return level


def _check_limit() -> None:
    """Raise if numba had compiled with withheld features before the level was set."""
    if left := WITHHELD & _compiled_for():
        raise RuntimeError(
            f"{LEVEL_VARIABLE} is {LEVEL!r}, but numba already compiles with {', '.join(sorted(left))}: "
            "import moiety_kernels before code that compiles with numba"
        )


def _set_arm_extensions(*, are_used: bool) -> frozenset[str]:
    """Let numba use or not use the extensions of this Arm processor; return those it has. Must run before it compiles.

    LLVM knows them by the model of the processor, but does not list them; Linux does, by LLVM's names.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = next((line.partition(":")[2].split() for line in lines if line.startswith("Features")), [])
    found = ARM_EXTENSIONS.intersection(listed)
    features = llvm.get_host_cpu_features()
    for name in found:
        features[name] = are_used
    features["dotprod"] = "asimddp" in listed
    config.CPU_FEATURES = features.flatten()  # type: ignore[attr-defined]
    return found


_CPU_FEATURES = frozenset(name for name, is_there in llvm.get_host_cpu_features().items() if is_there)
_HAS_SLOW_PAIRS = IS_X86 and has_slow_pairs(llvm.get_host_cpu_name())
COMPILED_LEVEL = _choose_level()  # "" on other CPUs than x86, and without AVX2
SLOW_PAIRS = _HAS_SLOW_PAIRS if not LEVEL else LEVEL in X86_LEVELS and X86_LEVELS[LEVEL].has_slow_pairs
SLOW_PAIRS = SLOW_PAIRS and PAIRS_FEATURE not in EMULATED
WITHHELD = frozenset[str]()  # features that the CPU has and LEVEL does not
if LEVEL and COMPILED_LEVEL:
    WITHHELD = (_CPU_FEATURES & OPTIONAL_FEATURES) - X86_LEVELS[COMPILED_LEVEL].features
    _check_limit()
if platform.machine() == "aarch64":
    _extensions = _set_arm_extensions(are_used=not LEVEL)
    WITHHELD = _extensions if LEVEL else WITHHELD
_HOST = _compiled_for()
ARM = LEVEL == ARM_LEVEL or ARM_FEATURE in _HOST  # kernels use no instruction of x86 by name
if not ARM and (further := EMULATED & ARM_EXTENSIONS):
    raise ValueError(f"{VARIABLE} names {', '.join(sorted(further))}; these need {LEVEL_VARIABLE}={ARM_LEVEL}")
_FURTHER = ({"amx-tile"} if TILES_FEATURE in EMULATED else set()) | ({ARM_FEATURE} if ARM else set())
FEATURES = _HOST | EMULATED | _FURTHER
WIDE = "avx512f" in _HOST or bool(EMULATED - ARM_EXTENSIONS)  # 16 floats per vector
