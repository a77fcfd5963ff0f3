"""Messages between a gateway and its document processes, sent as frames of `moiety_limited_processes`."""

from __future__ import annotations

import msgspec


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
