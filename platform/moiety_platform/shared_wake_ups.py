"""Times at which the timers of one process end together.

A wake-up of an idle process costs more than the work of most timers. The times have a phase of their own in each
process, so that the gateways of one machine do not ask the database at once.
"""

from __future__ import annotations

import functools
import random

ALIGN_S = 0.5  # of intervals that are multiples of it
LONG_ALIGN_S = 2.5
LEAST_SHARE = 0.2  # of the interval, before the first round
DUE_SHARE = 0.9  # of the interval, after which a round may do what is due: wake-ups vary by milliseconds


@functools.cache
def process_phase_s() -> float:
    """Return the phase of this process, from 0 to ALIGN_S. LONG_ALIGN_S is a multiple of it."""
    return random.random() * ALIGN_S


def next_round_s(now_s: float, every_s: float, phase_s: float) -> float:
    """Return the time of the next round of a timer: the end of its interval, or somewhat before it.

    Rounds at an interval that is a multiple of LONG_ALIGN_S or ALIGN_S are at the phase after a multiple of this.
    """
    end_s = now_s + every_s
    align_s = next((one for one in (LONG_ALIGN_S, ALIGN_S) if every_s % one == 0), None)
    if align_s is None:
        return end_s
    aligned_s = (end_s - phase_s) // align_s * align_s + phase_s
    return aligned_s if aligned_s - now_s >= LEAST_SHARE * every_s else aligned_s + align_s
