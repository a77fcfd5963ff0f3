"""Command line of a core process, and its end with the engine server that started it."""

from __future__ import annotations

import argparse
import os
import threading

from moiety_engine.first_steps import FirstSteps

EXIT_SERVER_LOST = 3  # exit code if the engine server has ended
EXIT_REFUSED = 4


def parse_arguments(program: str) -> tuple[str, FirstSteps | None]:
    """Return the ZeroMQ address of the engine server's socket, and the memory for first steps, if there is one."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--address", required=True, help="ZeroMQ address of the engine server's PAIR socket")
    parser.add_argument("--first-steps-fd", type=int, help="descriptor of the memory for FirstSteps")
    arguments = parser.parse_args()
    first_steps = None if arguments.first_steps_fd is None else FirstSteps(arguments.first_steps_fd)
    return arguments.address, first_steps


def end_with_server() -> None:
    """Start a thread that ends this process when standard input closes, which the engine server holds open."""
    threading.Thread(target=_wait_for_end, name="server-watch", daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 4096):  # unbuffered: a thread inside sys.stdin would abort the interpreter's exit
        pass
    os._exit(EXIT_SERVER_LOST)  # the step thread may be inside a kernel, and there is no state to save
