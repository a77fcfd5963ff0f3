"""Main function of a core process: read the settings, serve, report errors, and end with the engine server.

It reads its EngineConfig as one line of JSON from standard input, which then stays open. When standard input closes,
the engine server has ended, and the core ends at once.
"""

from __future__ import annotations

import os
import sys

import msgspec
import structlog
import zmq

from moiety_engine.config import EngineConfig
from moiety_engine.core.command import EXIT_REFUSED, EXIT_SERVER_LOST, end_with_server, parse_arguments
from moiety_engine.core.link import ServerLink
from moiety_engine.core.service import serve
from moiety_engine.distribution.rendezvous_address import rendezvous_from
from moiety_engine.errors import EngineError
from moiety_engine.logs import configure_logs


def main() -> int:
    address, first_steps = parse_arguments("moiety_engine.core")
    configure_logs()
    log = structlog.get_logger()
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_SERVER_LOST
    config = msgspec.json.decode(line, type=EngineConfig)
    end_with_server()
    with zmq.Context() as context, ServerLink(context, address) as link:
        try:
            serve(link, config, rendezvous_from(os.environ), first_steps)
        except EngineError as exc:
            log.error("core_refused", reason=str(exc))
            link.send_refusal(str(exc))
            return EXIT_REFUSED
    return 0
