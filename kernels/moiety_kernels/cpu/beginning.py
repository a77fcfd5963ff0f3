"""Compiler warm-up in the background at start.

numba's own modules and tables take most of a second to load; a thread that reads weights does not need them.
"""

from __future__ import annotations

import importlib
import threading


def begin() -> threading.Thread:
    """Start and return the thread that loads the compiler.

    If the compiler is not available, the first kernel raises the error.
    """
    thread = threading.Thread(target=_begin, name="compiler", daemon=True)
    thread.start()
    return thread


def _begin() -> None:
    compiling = importlib.import_module("moiety_kernels.cpu.compiling")
    team = importlib.import_module("moiety_kernels.cpu.team")
    compiling.driver_address(team.parallel)
