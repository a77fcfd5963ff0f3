"""Uniform random numbers that depend on a seed and an output position only.

The same seed gives the same tokens regardless of the rest of the batch, after a preemption, and on another replica.

SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniforms(seeds: list[int], positions: list[int]) -> np.ndarray:
    """Return for each pair a number in [0, 1), float64, with 53 random bits. `positions` count output tokens from 0."""
    golden = np.uint64(_GOLDEN)
    seed = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    place = np.array(positions, dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        mixed = _mix(_mix(seed + golden) + place * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed
