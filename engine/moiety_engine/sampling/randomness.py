"""One uniform number for a seed and an output position, and nothing else: so the same seed gives the same tokens
whatever else is in the batch, after a preemption, and on another replica.

SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 53 random bits. `position` counts output tokens from 0."""
    stream = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((stream + (position + 1) * _GOLDEN) & _MASK) >> 11) / (1 << 53)
