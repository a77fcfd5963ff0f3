"""Owner of the document processes of one gateway: a template, and a process for each PDF file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog

from moiety_limited_processes.errors import WorkerFailed
from moiety_limited_processes.frames import ChildExit, FrameTooLong, receive_frame, send_frame
from moiety_limited_processes.processes import ForkTemplate, ProcessLimit, is_own_fault, name_of, reached_limit
from moiety_platform.document_extraction.frames import (
    DocumentTemplateReady,
    ExtractionOrder,
    ExtractionReport,
    RefusalReason,
)
from moiety_platform.errors import Unavailable

log = structlog.get_logger(__name__)

WORKER = ("-m", "moiety_platform.document_extraction.worker")
MAX_ATTEMPTS = 2  # a process that was killed from outside does not count against its file
GRACE_S = 5.0  # beyond the time of a process, in which the kernel ends it
MAX_REFUSAL_CHARS = 300
MAX_CHARACTER_BYTES = 4  # in UTF-8
MAX_REPORT_BYTES = 4096  # of a report, beside its text
RETRY_AFTER_S = 5.0
COMPROMISED = "makes its reader answer nonsense; send its text"
_PASSED_ON = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")


class DocumentRefused(Exception):
    """A document cannot be read. The message continues a sentence about it."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Limits of the documents of one request together, and of each process that reads a PDF file."""

    max_bytes: int = 32 << 20
    max_pages: int = 600
    max_characters: int = 4 << 20
    cpu_s: float = 20.0
    wall_s: float = 60.0
    memory_bytes: int = 512 << 20  # beyond what a process has at its start
    max_requests_per_tenant: int = 16  # that read documents or wait to


@dataclass(frozen=True, slots=True)
class ExtractedText:
    """Text of a PDF file."""

    text: str
    num_pages: int


class PdfExtractor:
    """Extracts the text of PDF files, each in a new process. The template process starts with the first file."""

    def __init__(self, worker: Sequence[str] = WORKER) -> None:
        """Create the extractor. `worker`: arguments of Python that start the template process."""
        self._worker = worker
        self._template: ForkTemplate[DocumentTemplateReady] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def extract(self, data: bytes, limits: DocumentLimits) -> ExtractedText:
        """Return the text of a PDF file. Blocks; for threads.

        Raises DocumentRefused, and Unavailable where the file was not read for a reason that is not its own.
        """
        order = ExtractionOrder(
            data, limits.max_pages, limits.max_characters, limits.cpu_s, limits.wall_s, limits.memory_bytes
        )
        try:
            for attempt in range(MAX_ATTEMPTS):
                report = self._run_order(order, is_last=attempt == MAX_ATTEMPTS - 1)
                if report is not None:
                    return _checked(report, limits)
        except WorkerFailed as exc:
            raise _unavailable(f"documents cannot be read now: {exc}") from exc
        raise AssertionError("the last attempt has a result or raises")

    def close(self) -> None:
        """End the template process, and with it all document processes; it does not start again. May block."""
        with self._lock:
            self._is_closed = True
            if self._template is not None:
                self._template.close()

    def _run_order(self, order: ExtractionOrder, *, is_last: bool) -> ExtractionReport | None:
        """Return the report of one process; None if another one should try.

        Raises DocumentRefused, Unavailable and WorkerFailed.
        """
        template = self._started()
        template_pid, begun_s = template.pid, time.monotonic()
        deadline_s = begun_s + order.wall_s + GRACE_S
        max_bytes = order.max_characters * MAX_CHARACTER_BYTES + MAX_REPORT_BYTES
        with template.fork() as child:
            child.link.settimeout(order.wall_s + GRACE_S)
            try:
                send_frame(child.link, order)
                return receive_frame(child.link, ExtractionReport, deadline_s=deadline_s, max_bytes=max_bytes)
            except FrameTooLong as exc:
                child.kill()
                raise DocumentRefused(COMPROMISED, RefusalReason.INVALID_REPORT) from exc
            except (EOFError, OSError):  # including TimeoutError
                end = child.kill()
            except msgspec.MsgspecError as exc:  # a file may take over its process, which then says what it likes
                child.kill()
                raise DocumentRefused(COMPROMISED, RefusalReason.INVALID_REPORT) from exc
        is_late = time.monotonic() - begun_s > order.wall_s
        log.warning("document_process_ended", ended_by="unknown" if end is None else name_of(end), is_late=is_late)
        if end is None:
            template.restart(template_pid)
        elif reached_limit(end) is not ProcessLimit.WALL_TIME and is_own_fault(end):
            raise _cost_refusal(end, order)
        if is_late:
            raise _unavailable(f"reading a document took more than {order.wall_s:g} s on this busy server")
        if is_last:
            raise _unavailable("the process that read a document was killed")
        return None

    def _started(self) -> ForkTemplate[DocumentTemplateReady]:
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the server is shutting down")
            if self._template is None:
                environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}  # no secrets
                self._template = ForkTemplate(list(self._worker), DocumentTemplateReady, lambda _: None, environment)
            return self._template


def _checked(report: ExtractionReport, limits: DocumentLimits) -> ExtractedText:
    """Return the text of a report, whose sizes are checked, since a file may have taken over the process."""
    if report.refusal:
        raise DocumentRefused(report.refusal[:MAX_REFUSAL_CHARS], report.reason)
    if len(report.text) > limits.max_characters or not 0 < report.num_pages <= limits.max_pages:
        raise DocumentRefused(COMPROMISED, RefusalReason.INVALID_REPORT)
    return ExtractedText(report.text, report.num_pages)


def _cost_refusal(end: ChildExit, order: ExtractionOrder) -> DocumentRefused:
    limit = reached_limit(end)
    if limit is ProcessLimit.CPU_TIME:
        why = f"takes more than {order.cpu_s:g} s of processor time to read; send fewer pages, or its text"
        return DocumentRefused(why, RefusalReason.CPU_TIME)
    if limit is ProcessLimit.MEMORY:
        why = f"takes more than {order.memory_bytes >> 20} MiB of memory to read; send fewer pages, or its text"
        return DocumentRefused(why, RefusalReason.MEMORY)
    return DocumentRefused(f"crashes its reader ({name_of(end)}); send its text", RefusalReason.CRASH)


def _unavailable(message: str) -> Unavailable:
    return Unavailable(f"{message}; send the request again", code="document_not_read", retry_after_s=RETRY_AFTER_S)
