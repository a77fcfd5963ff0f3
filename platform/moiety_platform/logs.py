"""Structured logs: one JSON object a line, or coloured columns on a terminal. Never a prompt, never a key."""

from __future__ import annotations

import asyncio
import io
import logging
import sys
import threading
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec
import structlog

from moiety_platform.printable import printable, printable_lines

_LEVELS = {"warn": "warning", "exception": "error"}  # as structlog's own processor has it
_encoder = msgspec.json.Encoder(enc_hook=repr)
_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
)


class _Logger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc]  # a class made at run time
    """What every logger is once it was used. Its methods are those of the level; see `set_log_level`."""


class Lines:
    """Writes what is told: of one turn of an event loop in one go, since each request tells something and to write it
    alone would cost a system call; with a warning, and what is told in threads, at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # in which they are to be written
        self._lock = threading.Lock()

    def gather(self, line: str) -> None:
        """Write it by the end of this turn."""
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
    """From now on, of loggers that have been used before too."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    chosen = structlog.make_filtering_bound_logger(threshold)
    for name in _METHODS:
        setattr(_Logger, name, getattr(chosen, name))
    # what libraries say of their work has SQL parameters in it, and so prompts, and addresses of webhooks
    logging.getLogger().setLevel(max(threshold, logging.WARNING))


def configure_logging(level: str, log_format: str, stream: TextIO = sys.stderr) -> None:
    """Send structlog's and the standard library's events to `stream`. Called once, by a process's entry point."""
    on_terminal = log_format == "console" or (log_format == "auto" and stream.isatty())
    set_log_level(level)
    tail: list[structlog.typing.Processor]
    if on_terminal:
        tail = [_make_printable, structlog.dev.ConsoleRenderer(exception_formatter=_show_traceback)]
    else:
        tail = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    lines = Lines(stream)  # of all loggers, so that what they tell stands in its order
    structlog.configure(
        processors=[*_SHARED, *tail] if on_terminal else [_as_json],
        wrapper_class=_Logger,
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail],
        )
    )
    logging.getLogger().handlers[:] = [handler]


def _as_json(logger: Any, method: str, event: structlog.typing.EventDict) -> str:
    """What the processors for JSON make of an event, in one step, since there is one for every request."""
    if "exc_info" in event or "stack_info" in event:
        event = structlog.processors.StackInfoRenderer()(logger, method, event)
        event = structlog.processors.format_exc_info(logger, method, event)
    event["level"] = _LEVELS.get(method, method)
    event["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return _to_json(event)


def _to_json(event: Any, **_: Any) -> str:
    """The event on one line; what a terminal would not draw is escaped, as JSON may."""
    return printable(_encoder.encode(event).decode())


def _make_printable(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """The same for the columns of a terminal, which show text as it is."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _show_traceback(stream: TextIO, exc_info: Any) -> None:
    """A traceback without local variables, among which are prompts."""
    told = io.StringIO()
    structlog.dev.plain_traceback(told, exc_info)
    stream.write(printable_lines(told.getvalue()))
