"""Server-sent events of a stream of bytes: the data of each, in pieces as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from moiety_platform.engine_client.foreign.piece import BadAnswer

MAX_LINE_BYTES = 4 * 1024 * 1024
DATA = b"data:"


async def data_of_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The `data:` lines, one event each, which is how these servers send. Raises BadAnswer for a line without end."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise BadAnswer(f"a line of more than {MAX_LINE_BYTES} bytes came")
        for line in lines:
            if line.startswith(DATA):
                yield line[len(DATA) :].strip()
