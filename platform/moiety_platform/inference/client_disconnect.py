"""The client's leaving, noticed while an answer is being made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

DEPARTURE = "moiety.departure"
"""Where the server puts, into a request's `state`, the DisconnectSignal of the request's client."""


class ClientDisconnected(Exception):  # not an error of ours: there is nobody left to answer
    """The client hung up."""


class DisconnectSignal:
    """Of one connection's client. Owned by the connection, which says when; one at a time may wait for it."""

    def __init__(self, drop: Callable[[], None] = lambda: None) -> None:
        """`drop` ends the connection at once, whatever the client has not taken yet."""
        self.drop = drop
        self.has_left = False
        self.on_left: Callable[[], None] | None = None

    def note(self) -> None:
        """The client has left."""
        self.has_left = True
        if self.on_left is not None:
            self.on_left()

    @classmethod
    def of(cls, state: dict[str, Any]) -> DisconnectSignal:
        """The one of a request; under a server that tells of none, one that never comes."""
        found = state.get(DEPARTURE)
        return found if isinstance(found, DisconnectSignal) else cls()


class WatchingForDisconnect:
    """Cancels what runs inside as soon as the client leaves, and raises ClientDisconnected."""

    __slots__ = ("_departure", "_is_gone", "_task")

    def __init__(self, departure: DisconnectSignal) -> None:
        self._departure = departure
        self._task: asyncio.Task[Any] | None = None
        self._is_gone = False

    def __enter__(self) -> None:
        if self._departure.has_left:
            raise ClientDisconnected
        self._task = asyncio.current_task()
        self._departure.on_left = self._leave

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._departure.on_left = None
        is_ours = isinstance(exc, asyncio.CancelledError) and self._is_gone
        if is_ours and self._task is not None and self._task.uncancel() == 0:
            raise ClientDisconnected from exc

    def _leave(self) -> None:
        if self._task is not None and not self._is_gone:
            self._is_gone = True
            self._task.cancel()
