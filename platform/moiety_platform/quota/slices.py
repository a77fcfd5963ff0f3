"""Size of a lease: how much of a limit a replica leases at once, and when it gives back. Pure."""

from __future__ import annotations

SECONDS_AHEAD = 6.0  # of recent use: enough for a short outage of the store
SLOTS_PART = 8  # of a cap on open requests, at most 1/SLOTS_PART is leased ahead


def ahead_of_use(use_per_s: float) -> int:
    """Return the amount of a stock or a rate to keep beyond current use."""
    return int(SECONDS_AHEAD * use_per_s)


def ahead_of_peak(peak: float, cap: int) -> int:
    """Return the number of slots to lease: as many as were recently open.

    It is 0 for a small limit, whose slots other replicas may need.
    """
    return min(int(peak), cap // SLOTS_PART)


def slice_size(lacking: int, ahead: int, remaining: int, num_replicas: int) -> int:
    """Return the amount to request when `lacking` is missing.

    It adds some ahead of use, but at most an equal part of half of what remains, so that no replica takes what others
    need; near the cap it is only the lacking amount.
    """
    return max(lacking, min(ahead, remaining // (2 * max(1, num_replicas))))


def surplus(free: int, ahead: int) -> int:
    """Return the part of `free` to give back: all beyond twice the amount that is requested ahead."""
    return max(0, free - 2 * ahead)
