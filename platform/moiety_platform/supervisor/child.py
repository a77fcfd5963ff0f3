"""The first thing that a supervised process runs: tie its life to the supervisor's, then become the command.

`python -P -m moiety_platform.supervisor.child SUPERVISOR_PID COMMAND…` dies with its supervisor, however that ends, so
that a `kill -9` leaves no orphan. On Linux the kernel sees to it; elsewhere a thread watches the parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
POLL_INTERVAL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """From now on this process is killed when `parent_pid`, its parent, ends."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # it ended before we asked to be told
        sys.exit(1)


def watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    from moiety_platform.cli.main import main as run_command  # noqa: PLC0415  after the parent is watched, since it takes longer

    run_command(sys.argv[2:])


if __name__ == "__main__":
    main()
