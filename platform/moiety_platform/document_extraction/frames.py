"""Messages between a gateway and its document processes, sent as frames of `moiety_limited_processes`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class RefusalReason(StrEnum):
    """Why a document is not read, as metrics count it."""

    ENCRYPTED = "encrypted"
    DAMAGED = "damaged"
    NO_TEXT = "no_text"
    NOT_TEXT = "not_text"  # neither a PDF file nor plain text
    LINK = "link"  # that cannot be followed
    WRONG_PURPOSE = "wrong_purpose"  # of an upload
    TOO_MANY_BYTES = "too_many_bytes"
    TOO_MANY_PAGES = "too_many_pages"
    TOO_MANY_CHARACTERS = "too_many_characters"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    CRASH = "crash"
    INVALID_REPORT = "invalid_report"  # of its process


class DocumentTemplateReady(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the template process."""


class ExtractionOrder(msgspec.Struct, frozen=True, array_like=True):
    """Extract the text of one PDF file, report, and end."""

    data: bytes
    max_pages: int
    max_characters: int
    cpu_s: float
    wall_s: float
    memory_bytes: int


class ExtractionReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of an order: the text and its number of pages, or the reason of a refusal for the client."""

    refusal: str
    text: str = ""
    num_pages: int = 0
    reason: RefusalReason = RefusalReason.DAMAGED  # of a refusal
