"""How much of a limit a replica leases at once, and when it gives back. Pure."""

from __future__ import annotations

SECONDS_AHEAD = 6.0  # of recent use: what a short outage of the store is to be survived with
SLOTS_PART = 8  # of a cap on open requests, at most one part in so many is leased ahead


def ahead_of_use(use_per_s: float) -> int:
    """How much of a stock or a rate to have beyond what is in use."""
    return int(SECONDS_AHEAD * use_per_s)


def ahead_of_peak(peak: float, cap: int) -> int:
    """How many slots to have: as many as were open of late, but of a small limit none, for others may want them."""
    return min(int(peak), cap // SLOTS_PART)


def slice_size(lacking: int, ahead: int, remaining: int, num_replicas: int) -> int:
    """How much to ask for when so much is lacking: some more ahead of use, but no more than an equal part of half of
    what remains, so that no replica corners what others need; near the cap just what is lacking."""
    return max(lacking, min(ahead, remaining // (2 * max(1, num_replicas))))


def surplus(free: int, ahead: int) -> int:
    """What is to be given back of what is free: all beyond twice what is asked for ahead."""
    return max(0, free - 2 * ahead)
