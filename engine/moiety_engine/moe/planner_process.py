"""Planning of expert placements in a process of its own.

A plan of four layers takes tens of milliseconds of numpy and Python. A thread would delay the step loop too, since
both need the interpreter. The process starts with the first plan, has a lower priority, and ends with its parent.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import msgspec

from moiety_engine.moe.move_planner import PlanFailed, PlannedMove, PlanRequest, compute_plan
from moiety_limited_processes.child_limits import end_with_parent
from moiety_limited_processes.frames import receive_frame, send_frame

PLAN_S = 120.0  # longest wait for a plan; one of four layers of 256 experts takes 0.1 s
_NICENESS = 10
_STANDARD_ERROR = 2


class PlannerProcess:
    """Owner of the process. Used by one thread; a thread of its own waits for each plan."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._moves: list[PlannedMove] | None = None
        self._problem: Exception | None = None

    def begin(self, request: PlanRequest) -> None:
        """Send the request; the process is started, or started again, where there is none."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            try:
                self._start()
            except OSError as exc:  # no memory, or no free descriptor: `take` reports it
                self._problem = exc
                return
        self._thread = threading.Thread(target=self._ask, args=(request,), name="expert-planner", daemon=True)
        self._thread.start()

    def take(self) -> list[PlannedMove] | None:
        """Return the moves once they are there; see PlacementPlanner."""
        if self._thread is None and self._problem is None:
            return None
        if self._thread is not None and self._thread.is_alive():
            return None
        problem, moves = self._problem, self._moves
        self._thread = self._problem = self._moves = None
        if problem is not None:
            self.close()
            raise PlanFailed(f"the process that plans the placement of experts failed: {problem}") from problem
        return moves

    def close(self) -> None:
        """End the process."""
        if self._process is None or self._link is None:
            return
        self._process.kill()
        self._process.wait()
        if self._thread is not None:
            self._thread.join()  # the connection has ended
        self._link.close()
        self._process = self._link = self._thread = self._problem = self._moves = None

    def _start(self) -> None:
        link, other = socket.socketpair()
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=_STANDARD_ERROR
                )
            except OSError:
                link.close()
                raise
        link.settimeout(PLAN_S)
        self._link = link

    def _ask(self, request: PlanRequest) -> None:
        assert self._link is not None
        try:
            send_frame(self._link, request)
            self._moves = receive_frame(self._link, list[PlannedMove])
        except (OSError, EOFError, msgspec.MsgspecError) as exc:
            self._problem = exc


def serve_plans(link: socket.socket) -> None:
    """Answer requests until the other end closes."""
    while True:
        try:
            request = receive_frame(link, PlanRequest)
        except EOFError:
            return
        send_frame(link, compute_plan(request))


def main() -> None:
    """Run the process: `python -m … FD`, where FD is its end of the connection."""
    end_with_parent()
    os.nice(_NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as link:
        serve_plans(link)


if __name__ == "__main__":
    main()
