"""Log entries about connections to engines."""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)


def warn_of_broken_connection(event: str, engine: str, reason: str, num_streams: int) -> None:
    """Log that an engine, or a connection to it, was lost with so many streams open."""
    log.warning(
        event,
        engine=engine,
        reason=reason,
        num_streams=num_streams,
        advice="check whether the engine runs and is reachable",
    )
