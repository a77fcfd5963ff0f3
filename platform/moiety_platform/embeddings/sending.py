"""Sending of whole answers of embeddings and scores."""

from __future__ import annotations

from collections.abc import Iterator

from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse


async def send_pieces(pieces: Iterator[bytes], record: RequestRecord, reply: HttpResponse) -> None:
    """Send a whole answer piece by piece."""
    record.answered_status = 200
    await reply.pieces(pieces)
