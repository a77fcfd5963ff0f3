"""Background threads that do not preempt the event loop.

Linux lets a woken thread preempt the thread that woke it: on a busy core a request that hands work to the store would
be interrupted, and continue with cold caches, for work that can wait until the loop is idle. Not for threads that a
client waits for: on a core shared with other processes, they would wait for those, too.
"""

from __future__ import annotations

import contextlib
import os
import sys


def lower_priority() -> None:
    """Let the calling thread wait for its turn when it is woken, with the same share of the processor.

    Effective from now on, where the system permits it.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
