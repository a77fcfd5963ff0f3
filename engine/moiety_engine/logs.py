"""Logging of the engine's processes: one line of JSON per event, on standard error.

A line that cannot be written, as on a full disk, is lost.
"""

from __future__ import annotations

import sys
from typing import TextIO, cast

import structlog

from moiety_wire.lossy_stream import LossyStream


def configure_logs() -> None:
    """Configure logging. Called once by an entry point."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, LossyStream(sys.stderr))),
    )
