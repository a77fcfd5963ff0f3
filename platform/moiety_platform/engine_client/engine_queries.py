"""Queries to an engine and their answers, over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moiety_platform.errors import Unavailable
from moiety_wire.experts import ExpertLoad, ExpertLoadQuery

ANSWER_WAIT_S = 3.0  # longer than most steps, since an engine answers between steps


class EngineQueries:
    """Owner of the open queries."""

    def __init__(self, send: Callable[[ExpertLoadQuery], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[ExpertLoad]] = {}
        self._num_asked = 0

    async def ask(self, minutes: int, tenant_id: str | None) -> ExpertLoad:
        """Query the expert load. Raises Unavailable if no answer arrives in time."""
        self._num_asked += 1
        query_id = self._num_asked
        answer: asyncio.Future[ExpertLoad] = asyncio.get_running_loop().create_future()
        self._open[query_id] = answer
        self._send(ExpertLoadQuery(query_id, minutes, tenant_id))
        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                return await answer
        except TimeoutError as exc:
            raise Unavailable("the engine does not answer; try again shortly", retry_after_s=1) from exc
        finally:
            del self._open[query_id]

    def take(self, load: ExpertLoad) -> None:
        """Deliver an answer. An answer that is too late is dropped."""
        answer = self._open.get(load.query_id)
        if answer is not None and not answer.done():
            answer.set_result(load)

    def close(self) -> None:
        """Fail all open queries."""
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(
                    Unavailable("the engine is no longer available; try again shortly", retry_after_s=1)
                )
