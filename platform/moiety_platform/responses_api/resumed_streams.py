"""Streams of background responses that a client resumes, at any gateway, after the last event that it has read.

The gateway that makes a response stores its events about twice a second; this one polls them. The last event is made
from the stored response, so it is there however the response has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from moiety_platform.admission.gate import StreamGate
from moiety_platform.auth.principal import Principal
from moiety_platform.errors import BadRequest, PlatformError, Unavailable
from moiety_platform.inference.text_answer import KEEP_ALIVE
from moiety_platform.responses_api.event_log import numbered
from moiety_platform.responses_api.events import ending_event, error_event
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.store import READ_CHUNKS

POLL_S = 0.25  # at first; it grows while nothing comes
MAX_POLL_S = 1.0
KEEP_ALIVE_S = 15.0
LOST = "the events from {:,} on are not stored; retrieve the response without 'stream'"


@dataclass(frozen=True, slots=True)
class ResumedStreams:
    """Reader of stored events. `is_stopping` says whether the process stops, which ends its resumed streams."""

    service: ResponseService
    gate: StreamGate  # of keys
    tenants: StreamGate
    is_stopping: Callable[[], bool] = lambda: False

    async def open(self, whose: Principal, response_id: str, starting_after: int) -> AsyncGenerator[bytes]:
        """Return the events of a response after a sequence number, until its end.

        Raises NotFound, RateLimited or Unavailable, or BadRequest if the response has no events.
        """
        state = await self.service.run_state(whose, response_id)
        if state.num_events is None:
            raise BadRequest(
                "only responses that were created with 'background' and 'stream' can be streamed again; leave 'stream' "
                "out",
                code="response_not_streamable",
                param="stream",
            )
        events = self._events(whose, response_id, starting_after + 1)
        first = await anext(events)  # which takes the places at the gates
        return _chained(first, events)

    async def _events(self, whose: Principal, response_id: str, number: int) -> AsyncGenerator[bytes]:
        with self.gate.hold(whose.root_key_id), self.tenants.hold(whose.tenant_id):
            yield KEEP_ALIVE
            try:
                async with aclosing(self._stored(whose, response_id, number)) as stored:
                    async for data, next_number in stored:
                        number = next_number
                        yield data
            except PlatformError as error:  # the client resumes, or retrieves the response
                # It has the number of the last event sent, so that a resumption after it loses none.
                yield error_event(error, number - 1 if number else None)

    async def _stored(self, whose: Principal, response_id: str, number: int) -> AsyncGenerator[tuple[bytes, int]]:
        """Yield events and the number after them, until the end. Raises NotFound or Unavailable."""
        wait_s, sent_s = POLL_S, time.monotonic()
        read_bytes: int | None = None  # of the response, when all of its events were read
        while not self.is_stopping():
            state = await self.service.run_state(whose, response_id)  # before the events: they are complete if it ended
            if state.num_bytes != read_bytes or not state.is_running:
                chunks, first = await self.service.events(response_id, number), number
                for data, next_number in numbered(chunks, number):
                    yield data, next_number
                    number, wait_s, sent_s = next_number, POLL_S, time.monotonic()
                read_bytes = state.num_bytes
                if number > first and len(chunks) == READ_CHUNKS:
                    read_bytes = None  # there may be more
                    continue
            if state.is_abandoned:
                await self.service.body(whose, response_id)  # which ends it
            elif not state.is_running:
                if number == state.num_events:
                    yield ending_event(await self.service.body(whose, response_id), number), number + 1
                elif number < (state.num_events or 0):
                    raise Unavailable(LOST.format(number), code="events_not_stored")
                return
            else:
                await asyncio.sleep(wait_s)
                wait_s = min(MAX_POLL_S, wait_s * 1.5)
                if time.monotonic() - sent_s > KEEP_ALIVE_S:
                    sent_s = time.monotonic()
                    yield KEEP_ALIVE, number


async def _chained(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for data in rest:
            yield data
