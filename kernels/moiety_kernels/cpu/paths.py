"""Table of the ways to multiply with each kind of weight, by the CPU features that each needs.

`python -m moiety_kernels.cpu.paths` prints which of them serve on this machine, and why no earlier one does.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, NamedTuple

from moiety_kernels.cpu.instructions import (
    ARM,
    ARM_FEATURE,
    ARM_PAIRS_FEATURE,
    COMPILE_ONLY,
    COMPILED_LEVEL,
    EMULATED,
    FEATURES,
    LEVEL,
    PAIRS_FEATURE,
    SLOW_PAIRS,
    TILES_FEATURE,
    WIDE,
    WITHHELD,
    WORDS_FEATURE,
)
from moiety_kernels.cpu.levels import LEVEL_VARIABLE


class KernelPath(NamedTuple):
    """A way to multiply, and the features without which it does not run."""

    name: str
    title: str
    features: frozenset[str] = frozenset()


TILES = KernelPath("tiles", "matrix tiles (AMX)", frozenset({"amx-tile", TILES_FEATURE, PAIRS_FEATURE}))
PAIRS = KernelPath("pairs", "pairs of bfloat16 (AVX512-BF16)", frozenset({PAIRS_FEATURE, WORDS_FEATURE}))
WORDS = KernelPath(
    "words",
    "products of 16-bit integers (AVX2, AVX512-BW or NEON)",
    frozenset({WORDS_FEATURE if WIDE else ARM_FEATURE if ARM else "avx2"}),
)
ARM_PAIRS = KernelPath("arm_pairs", "pairs of bfloat16 (Arm's BF16)", frozenset({ARM_FEATURE, ARM_PAIRS_FEATURE}))
FLOATS = KernelPath("floats", "float32, widened from bfloat16")

# the paths for each kind of weight, the preferred one first; float8 is unpacked and multiplied as bfloat16
PATHS: dict[str, tuple[KernelPath, ...]] = {
    "bfloat16": (TILES, PAIRS, *([ARM_PAIRS] if ARM else []), FLOATS),
    "8 bits": (TILES, WORDS, FLOATS),
    "4 bits": (TILES, PAIRS, WORDS, FLOATS),
    "4-bit floats": (TILES, PAIRS, FLOATS),
}
_BETTER_THAN_SLOW_PAIRS = frozenset({"bfloat16", "4 bits"})  # weights whose later paths are faster than slow pairs


@functools.cache
def is_usable(path: KernelPath) -> bool:
    """Return whether the CPU has the path's features and, for tiles, the system lets this process use them."""
    if path is FLOATS:
        return True
    if not (path.features <= FEATURES and (WIDE or path in (WORDS, ARM_PAIRS))):
        return False
    return path is not TILES or COMPILE_ONLY or TILES_FEATURE in EMULATED or _are_tiles_permitted()


def _are_tiles_permitted() -> bool:
    import torch  # noqa: PLC0415 - slow, and most CPUs have no tiles

    return bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def serving_path(weights: str) -> KernelPath:
    """Return the path that multiplies a kind of weight on this machine."""
    for path in PATHS[weights]:  # no generator, since every product asks
        if is_usable(path) and not _is_slow(path, weights):
            return path
    raise AssertionError("the last path of each kind needs no features")


def _is_slow(path: KernelPath, weights: str) -> bool:
    return SLOW_PAIRS and path is PAIRS and weights in _BETTER_THAN_SLOW_PAIRS


def reason_against(path: KernelPath) -> str:
    """Return the reason why this machine does not use a path."""
    withheld = path.features & WITHHELD
    if missing := path.features - FEATURES - withheld:
        return f"the processor has no {', '.join(sorted(missing))}"
    if withheld:
        return f"{LEVEL_VARIABLE}={LEVEL} withholds {', '.join(sorted(withheld))}"
    if SLOW_PAIRS and path is PAIRS:
        return f"slower on this processor for {' and '.join(sorted(_BETTER_THAN_SLOW_PAIRS, reverse=True))}"
    return "the system does not let this process use them" if path is TILES else "the processor has no avx512f"


def report() -> dict[str, Any]:
    """Return the levels of the features, and for each kind of weight the path and reasons against others.

    `compiled_for` is the level of the compiled code (None on other CPUs than x86), and `level` the one that limits it.
    """
    paths = {}
    for weights, candidates in PATHS.items():
        serving = serving_path(weights)
        before = candidates[: candidates.index(serving)]
        paths[weights] = {
            "path": serving.name,
            "title": serving.title,
            "not": {path.title: reason_against(path) for path in before},
        }
    levels = {"compiled_for": COMPILED_LEVEL or None, "level": LEVEL or None}
    return {**levels, "withheld": sorted(WITHHELD), "paths": paths}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report()) + "\n")
