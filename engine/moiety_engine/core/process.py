"""Main function of a core process: read the settings, serve, report errors, and end with the engine server.

It reads its EngineConfig as one line of JSON from standard input, which then stays open. When standard input closes,
the engine server has ended, and the core ends at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading

import msgspec
import structlog
import zmq

from moiety_engine.config import EngineConfig
from moiety_engine.core.link import ServerLink
from moiety_engine.core.service import serve
from moiety_engine.distribution.rendezvous_address import rendezvous_from
from moiety_engine.errors import EngineError
from moiety_engine.first_steps import FirstSteps
from moiety_engine.logs import configure_logs

LOST_FRONT = 3  # exit code if the engine server has ended
REFUSED = 4


def end_with_front() -> None:
    """Wait until standard input closes, and end the process."""
    while os.read(0, 4096):  # unbuffered: a thread inside sys.stdin would abort the interpreter's exit
        pass
    os._exit(LOST_FRONT)  # the step thread may be inside a kernel, and there is no state to save


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m moiety_engine.core")
    parser.add_argument("--address", required=True, help="ZeroMQ address of the engine server's PAIR socket")
    parser.add_argument("--first-steps-fd", type=int, help="descriptor of the memory for FirstSteps")
    arguments = parser.parse_args()
    first_steps = None if arguments.first_steps_fd is None else FirstSteps(arguments.first_steps_fd)
    configure_logs()
    log = structlog.get_logger()
    line = sys.stdin.buffer.readline()
    if not line:
        return LOST_FRONT
    config = msgspec.json.decode(line, type=EngineConfig)
    threading.Thread(target=end_with_front, name="life-line", daemon=True).start()
    with zmq.Context() as context, ServerLink(context, arguments.address) as link:
        try:
            serve(link, config, rendezvous_from(os.environ), first_steps)
        except EngineError as exc:
            log.error("core_refused", reason=str(exc))
            link.send_refusal(str(exc))
            return REFUSED
    return 0
