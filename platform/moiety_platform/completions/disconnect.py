"""The client's leaving, noticed while an answer is being made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from litestar.types import Receive


class ClientDisconnected(Exception):  # not an error of ours: there is nobody left to answer
    """The client hung up."""


@asynccontextmanager
async def watching_for_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel what runs inside as soon as the client leaves, and raise ClientDisconnected. The body must have been read:
    whatever `receive` still gives is the end of the connection."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError as exc:
        if gone and task.uncancel() == 0:
            raise ClientDisconnected from exc
        raise
    finally:
        watcher.cancel()
