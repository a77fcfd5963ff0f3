"""Threads beside the event loop that do not cut in. Linux lets a thread that is woken interrupt the one that woke it:
on a busy core a request that hands something to the store would be stopped in its middle, and find its caches cold, for
work that may as well be done when the loop waits. Not for threads that a client waits for: on a core that others use,
too, such a thread would have to wait for them as well.
"""

from __future__ import annotations

import contextlib
import os
import sys


def stand_back() -> None:
    """From now on the calling thread waits for its turn when it is woken, and has as much of the processor as before;
    where the system lets it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
