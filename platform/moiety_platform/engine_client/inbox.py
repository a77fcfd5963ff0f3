"""Queue of engine messages with one reader, shared by all streams of one HTTP request."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from moiety_platform.errors import PlatformError
from moiety_wire.messages import Accepted, Finished, Tokens

Sender = TypeVar("Sender")
Delivery = Accepted | Tokens | Finished


class Inbox(Generic[Sender]):
    """Deliveries in order of arrival. Its size is bounded by the credit of the streams that share it."""

    def __init__(self) -> None:
        self.deliveries: deque[tuple[Sender, Delivery | PlatformError]] = deque()  # not read yet
        self._reader: asyncio.Future[None] | None = None

    def put(self, stream: Sender, message: Delivery | PlatformError) -> None:
        self.deliveries.append((stream, message))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> tuple[Sender, Delivery]:
        """Return the next delivery. Raises the error of a failed stream."""
        stream, message = await self.get_any()
        if isinstance(message, Exception):
            raise message
        return stream, message

    async def get_any(self) -> tuple[Sender, Delivery | PlatformError]:
        """Return the next delivery, or the error of a failed stream, which is its last delivery."""
        while not self.deliveries:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.deliveries.popleft()
