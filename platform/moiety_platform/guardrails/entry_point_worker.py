"""`python -m moiety_platform.guardrails.entry_point_worker NAME FD`: template of the processes of one Python guardrail.

The template imports the check of the entry point NAME once. Each text is checked by a process of its own, forked from
the template, whose memory and time the kernel limits, so nothing of one text is left for another.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NoReturn

import msgspec

from moiety_limited_processes.child_limits import limit_child, run_to_exit
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.template import serve_template
from moiety_platform.guardrails.entry_point_frames import CheckOrder, CheckReport, GuardrailTemplateReady
from moiety_platform.guardrails.terms import ENTRY_POINT_GROUP

NICENESS = 5  # checks yield to the gateway's event loop
Check = Callable[[Mapping[str, Any]], bool]


def run_child(check: Check, link: socket.socket) -> NoReturn:
    """Execute one order, and end the process."""
    run_to_exit(partial(_run_order, check, link))


def _run_order(check: Check, link: socket.socket) -> None:
    order = receive_frame(link, CheckOrder)
    gc.enable()
    limit_child(niceness=NICENESS, memory_bytes=order.memory_bytes, cpu_s=order.wall_s, wall_s=order.wall_s)
    send_frame(link, report_of(check, order.request))


def report_of(check: Check, request: bytes) -> CheckReport:
    """Return the report of a check. Raises MemoryError."""
    try:
        found = check(msgspec.json.decode(request))
    except MemoryError:
        raise
    except Exception as exc:  # of the operator's code; its message may quote the text
        return CheckReport(False, type(exc).__name__)
    return CheckReport(found) if isinstance(found, bool) else CheckReport(False, f"returned {type(found).__name__}")


def load_check(name: str) -> Check:
    """Return the check of an entry point. Raises ValueError."""
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if len(found) != 1:
        raise ValueError(f"{len(found)} packages have the entry point {name!r} of {ENTRY_POINT_GROUP}")
    try:
        check = found[0].load()
    except Exception as exc:  # of the operator's code
        raise ValueError(f"the entry point {name!r} cannot be imported ({type(exc).__name__})") from exc
    if not callable(check):
        raise ValueError(f"the entry point {name!r} is not a function")
    loaded: Check = check
    return loaded


def main() -> int:
    name, fd = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    control = socket.socket(fileno=int(fd))
    try:
        check = load_check(name)
    except ValueError as exc:
        send_frame(control, GuardrailTemplateReady(str(exc)))
        return 1
    serve_template(control, GuardrailTemplateReady(), partial(run_child, check))
    return 0


if __name__ == "__main__":
    sys.exit(main())
