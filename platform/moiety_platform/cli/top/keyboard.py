"""Single keys from a terminal, without waiting for a line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator

try:
    import termios
    import tty
except ImportError:  # not on this system: no keys then
    termios = None  # type: ignore[assignment]

RIGHT, LEFT = "\x1b[C", "\x1b[D"

ReadKeys = Callable[[float], str]  # (longest wait in seconds) → the keys pressed


@contextlib.contextmanager
def keys_of_terminal() -> Iterator[ReadKeys]:
    """Yield a function that reads keys within the context; the terminal is restored afterwards.

    If standard input is not a terminal, the function only waits.
    """
    if termios is None or not sys.stdin.isatty():
        yield _only_wait
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda seconds: _read(descriptor, seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read(descriptor: int, seconds: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return ""
    pressed = os.read(descriptor, 64)
    text = pressed.decode(errors="replace") if pressed else "q"  # the terminal is gone
    return text.replace(RIGHT, ">").replace(LEFT, "<")


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
