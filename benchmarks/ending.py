"""End of the processes that a benchmark has started."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection


def stop_processes(processes: Collection[subprocess.Popen[bytes]], wait_s: float) -> None:
    """Terminate the processes at once, wait for each, and kill those that have not ended within `wait_s`."""
    for process in processes:
        process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        process.kill()
