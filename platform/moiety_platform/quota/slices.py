"""How much of a window a replica leases at once, and when it gives back. Pure."""

from __future__ import annotations

SECONDS_AHEAD = 3.0  # of recent use


def slice_size(lacking: int, use_per_s: float, remaining: int, num_replicas: int) -> int:
    """How much to ask for when so much is lacking: some seconds of recent use, but no more than an equal part of half
    of what remains, so that no replica corners what others need; near the cap just what is lacking."""
    ahead = min(int(SECONDS_AHEAD * use_per_s), remaining // (2 * max(1, num_replicas)))
    return max(lacking, ahead)


def surplus(free: int, use_per_s: float) -> int:
    """What is to be given back of what is free: all beyond twice what was asked for ahead."""
    return max(0, free - int(2 * SECONDS_AHEAD * use_per_s))
