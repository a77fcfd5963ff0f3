"""Detection of client disconnects while an answer is generated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

DISCONNECT_SIGNAL = "moiety.transfer"
"""Key in a request's `state` for the DisconnectSignal, which the server sets."""


class ClientDisconnected(Exception):  # no PlatformError: there is no client to answer
    """The client closed the connection."""


class DisconnectSignal:
    """Disconnect signal of one connection's client.

    Owned by the connection, which triggers it. At most one waiter is supported.
    """

    def __init__(self, drop: Callable[[], None] = lambda: None) -> None:
        """Create a signal. `drop` closes the connection at once and discards unsent data."""
        self.drop = drop
        self.has_left = False
        self.on_left: Callable[[], None] | None = None

    def note(self) -> None:
        """Signal that the client disconnected."""
        self.has_left = True
        if self.on_left is not None:
            self.on_left()

    @classmethod
    def of(cls, state: dict[str, Any]) -> DisconnectSignal:
        """Return the signal of a request. If the server sets none, return one that never triggers."""
        found = state.get(DISCONNECT_SIGNAL)
        return found if isinstance(found, DisconnectSignal) else cls()


class WatchingForDisconnect:
    """Context that is cancelled when the client disconnects, and then raises ClientDisconnected."""

    __slots__ = ("_disconnect", "_is_gone", "_task")

    def __init__(self, transfer: DisconnectSignal) -> None:
        self._disconnect = transfer
        self._task: asyncio.Task[Any] | None = None
        self._is_gone = False

    def __enter__(self) -> None:
        if self._disconnect.has_left:
            raise ClientDisconnected
        self._task = asyncio.current_task()
        self._disconnect.on_left = self._leave

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disconnect.on_left = None
        is_ours = isinstance(exc, asyncio.CancelledError) and self._is_gone
        if is_ours and self._task is not None and self._task.uncancel() == 0:
            raise ClientDisconnected from exc

    def _leave(self) -> None:
        if self._task is not None and not self._is_gone:
            self._is_gone = True
            self._task.cancel()
