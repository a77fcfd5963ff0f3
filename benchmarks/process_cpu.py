"""CPU time of an engine over several processes, which depends on other load far less than its speed does."""

from __future__ import annotations

import psutil


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the processes that it has started and that still run."""
    own = psutil.Process()
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))
