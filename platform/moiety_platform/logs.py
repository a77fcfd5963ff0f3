"""Structured logs: one JSON object per line, or coloured columns on a terminal. Never a prompt, never a key."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO, cast

import msgspec
import structlog

from moiety_platform.printable import printable, printable_lines
from moiety_platform.redaction import hide_url_passwords
from moiety_wire.lossy_stream import LossyStream

_LEVELS = {"warn": "warning", "exception": "error"}  # like structlog's own processor
_encoder = msgspec.json.Encoder(enc_hook=repr)
_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
)


class _Logger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc]  # a class made at run time
    """Class of every logger after its first use. Its methods are those of the level; see `set_log_level`."""


class Lines:
    """Writer of log lines that combines the lines of one event-loop iteration.

    Each request logs something, and a write per line would cost a system call. Warnings and lines from threads are
    written at once.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # that will write the waiting lines
        self._lock = threading.Lock()

    def gather(self, line: str) -> None:
        """Write the line by the end of this event-loop iteration."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.write(line)
            return
        with self._lock:
            self._waiting.append(line)
            is_first, self._loop = self._loop is not loop, loop
        if is_first:
            loop.call_soon(self._write)

    def write(self, line: str) -> None:
        with self._lock:
            self._waiting.append(line)
        self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._waiting, self._loop = self._waiting, [], None
            if lines:
                self._stream.write("\n".join([*lines, ""]))
                self._stream.flush()

    debug = info = msg = gather
    warn = warning = error = err = exception = critical = fatal = failure = log = write


_METHODS = [name for name in vars(structlog.make_filtering_bound_logger(logging.DEBUG)) if not name.startswith("_")]


def set_log_level(level: str) -> None:
    """Set the level from now on, also of loggers that have been used before."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    chosen = structlog.make_filtering_bound_logger(threshold)
    for name in _METHODS:
        setattr(_Logger, name, getattr(chosen, name))
    # log events of libraries contain SQL parameters, and so prompts, and addresses of webhooks
    logging.getLogger().setLevel(max(threshold, logging.WARNING))


def configure_logging(level: str, log_format: str, stream: TextIO = sys.stderr) -> None:
    """Send structlog's and the standard library's events to `stream`. Called once, by a process's entry point."""
    on_terminal = log_format == "console" or (log_format == "auto" and stream.isatty())
    set_log_level(level)
    tail: list[structlog.typing.Processor]
    if on_terminal:
        tail = [_make_printable, structlog.dev.ConsoleRenderer(exception_formatter=_show_traceback), _hide_passwords]
    else:
        tail = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    lossy = cast(TextIO, LossyStream(stream))  # a full disk must not fail a request
    lines = Lines(lossy)  # shared by all loggers, so that lines keep their order
    structlog.configure(
        processors=[*_SHARED, *tail] if on_terminal else [_as_json],
        wrapper_class=_Logger,
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(lossy)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
        )
    )
    logging.getLogger().handlers[:] = [handler]


def _as_json(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
    """Return the event as JSON, in one step instead of a chain of processors, since every request logs one."""
    if "exc_info" in event or "stack_info" in event:
        event = structlog.processors.StackInfoRenderer()(logger, method, event)
        event = structlog.processors.format_exc_info(logger, method, event)
    event["level"] = _LEVELS.get(method, method)
    event["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return _to_json(event)


def _to_json(event: Any, **_: Any) -> str:
    """Return the event on one line; unprintable characters are escaped, as JSON allows."""
    return hide_url_passwords(printable(_encoder.encode(event).decode()))


def _hide_passwords(_logger: Any, _method: str, line: Any) -> Any:
    return hide_url_passwords(line)


def _make_printable(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape unprintable characters in the columns of a terminal, which shows text as it is."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _show_traceback(stream: TextIO, exc_info: Any) -> None:
    """Write a traceback without local variables, which contain prompts."""
    told = io.StringIO()
    structlog.dev.plain_traceback(told, exc_info)
    stream.write(printable_lines(told.getvalue()))
