"""Entry point of a rank other than rank 0, which rank 0 starts on its own host: `python -m moiety_engine.core.worker`.

It reads its settings and the rendezvous as one line of JSON from standard input, which then stays open. If standard
input closes before the ranks have met, rank 0 has ended.
"""

from __future__ import annotations

import sys

import msgspec
import structlog

from moiety_engine.assembly import follow
from moiety_engine.config import EngineConfig
from moiety_engine.core.command import EXIT_REFUSED, EXIT_SERVER_LOST, end_with_server
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.errors import EngineError
from moiety_engine.logs import configure_logs


def follow_until_end(config: EngineConfig, rendezvous: Rendezvous) -> int:
    """Run as a worker rank, and return the exit code of the process."""
    log = structlog.get_logger()
    try:
        follow(config, rendezvous)
    except EngineError as exc:
        log.error("rank_refused", rank=rendezvous.rank, reason=str(exc))
        return EXIT_REFUSED
    return 0


def main() -> int:
    configure_logs()
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_SERVER_LOST
    config, rendezvous = msgspec.json.decode(line, type=tuple[EngineConfig, Rendezvous])
    end_with_server()
    return follow_until_end(config, rendezvous)


if __name__ == "__main__":
    sys.exit(main())
