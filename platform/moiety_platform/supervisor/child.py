"""Entry point of a supervised process: tie its lifetime to the supervisor's, then run the command.

`python -P -m moiety_platform.supervisor.child SUPERVISOR_PID COMMAND…` ends with its supervisor, even after `kill -9`,
so that no orphan remains. On Linux the kernel enforces this (PR_SET_PDEATHSIG); elsewhere a thread polls the parent.
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
    """Have this process killed when `parent_pid`, its parent, ends."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # the parent ended before prctl took effect
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
