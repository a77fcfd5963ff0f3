"""What the first kernel of a process waits for, begun beside other work of a start: numba's own modules and tables take
most of a second, and are nothing to a thread that reads weights."""

from __future__ import annotations

import importlib
import threading


def begin() -> threading.Thread:
    """Returns the thread that gets the compiler ready, for whoever is about to need it. A compiler that cannot be had
    is found out by the first kernel."""
    thread = threading.Thread(target=_begin, name="compiler", daemon=True)
    thread.start()
    return thread


def _begin() -> None:
    compiling = importlib.import_module("moiety_kernels.cpu.compiling")
    team = importlib.import_module("moiety_kernels.cpu.team")
    compiling.driver_address(team.parallel)
