"""A submitted request: its streams, what comes from them, and what they cost. Knows no HTTP."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Self

from moiety_platform.classes.terms import ChosenClass
from moiety_platform.clock import Clock
from moiety_platform.completions.promise import Progress
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.spending import Throttled
from moiety_platform.completions.text import ModelText
from moiety_platform.engine_client.inbox import Delivery, Inbox
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import Unavailable
from moiety_wire.messages import Accepted, EventKind, Finished, Tokens

CREDIT_REFUSED = "credit_refused"  # the detail of an end for want of credit


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Run:
    """A submitted request: iterate for (index of the sequence, message) until every sequence has finished.

    Credit is extended when the reader comes back for more, that is after it has relayed what it got; so a client that
    reads slowly pauses its sequences instead of filling memory."""

    def __init__(
        self,
        record: RequestRecord,
        chosen: ChosenClass,
        prompts: list[list[int]],
        text: ModelText,
        clock: Clock,
        credit_window: int,
    ) -> None:
        self.prompts = prompts
        self.text = text
        self._record = record
        self._chosen = chosen
        self._clock = clock
        self._credit_window = credit_window
        self.inbox = Inbox[EngineStream]()
        self.streams: list[EngineStream] = []
        self._index: dict[EngineStream, int] = {}
        self._progress: list[Progress] = []
        self._early: deque[tuple[EngineStream, Delivery]] = deque()  # came before the last verdict
        self._num_open = 0
        self._max_tokens: list[int] = []
        self._relaying: EngineStream | None = None

    def add(self, stream: EngineStream, num_prompt_tokens: int, max_tokens: int) -> None:
        """A sequence, its promise allowing for so many prompt tokens."""
        self._index[stream] = len(self.streams)
        self.streams.append(stream)
        self._max_tokens.append(max_tokens)
        self._num_open += 1
        self._progress.append(Progress(num_prompt_tokens))

    async def wait_admitted(self) -> None:
        """Return when every sequence is admitted; what comes meanwhile is kept for the reader. Raises what an engine
        turns one of them away with: then none is to be answered."""
        for stream in self.streams:
            while stream.accepted is None:
                self._early.append(await self.inbox.get())
        while any(stream.has_failed for stream in self.streams):
            self._early.append(await self.inbox.get())
        for stream in self.streams:
            assert stream.accepted is not None
            self._record.admitted(self._chosen.served(stream.accepted.served_class), stream.accepted.reason)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Tokens | Finished]:
        if self._relaying is not None:
            await self._extend(self._relaying)
            self._relaying = None
        if self._num_open == 0:
            raise StopAsyncIteration
        stream, message = await self._next()
        index = self._index[stream]
        if isinstance(message, Finished):
            self._num_open -= 1
            if message.embedding:  # all that comes of a prompt that is embedded
                self._progress[index].take(1, self._clock.monotonic() - self._record.started_s)
        else:
            self._relaying = stream
            self._note_tokens(self._progress[index], len(message.token_ids))
        return index, message

    async def _next(self) -> tuple[EngineStream, Tokens | Finished]:
        while True:
            stream, message = self._early.popleft() if self._early else await self.inbox.get()
            if not isinstance(message, Accepted):
                return stream, message

    def _note_tokens(self, progress: Progress, num_tokens: int) -> None:
        record = self._record
        record.last_token_s = now_s = self._clock.monotonic()
        if record.first_token_s is None:
            record.first_token_s = now_s
        progress.take(num_tokens, now_s - record.started_s)

    async def _extend(self, stream: EngineStream) -> None:
        """Keep a window of credit ahead of what was relayed; renewed by halves, so that few messages are needed. Where
        a limit has nothing left, the sequence ends with the credit that it has."""
        window = self._credit_window
        target = min(self._max_tokens[self._index[stream]], stream.num_output_tokens + window)
        more = target - stream.credit_tokens
        if stream.ended or more <= 0 or stream.credit_tokens - stream.num_output_tokens > window // 2:
            return
        reserved = self.usage().prompt_tokens + sum(
            other.num_output_tokens if other.ended else other.credit_tokens for other in self.streams
        )
        spending = self._record.spending
        if stream.credit_tokens > stream.num_output_tokens:
            try:
                granted = await spending.extend(reserved, more)
            except (Throttled, Unavailable):
                return  # there is credit left: asked again with the next tokens
        else:
            granted = await spending.extend_patiently(reserved, more)
        stream.extend(stream.credit_tokens + granted, last=granted == 0)

    def usage(self) -> Usage:
        """What has been generated so far; exact when every stream has ended."""
        ends = [stream.finished for stream in self.streams[:: max(1, len(self.streams) // len(self.prompts))]]
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            cached_tokens=sum(end.num_cached_tokens for end in ends if end is not None),
            output_tokens=sum(stream.num_output_tokens for stream in self.streams),
        )

    def abort(self) -> None:
        """End every sequence at its engine, where it has not ended."""
        for stream in self.streams:
            stream.abort()

    def settle(self) -> None:
        """Put what the streams counted into the record."""
        record, usage = self._record, self.usage()
        record.cached_tokens, record.output_tokens = usage.cached_tokens, usage.output_tokens
        record.progress = self._progress
        queues_ns = []
        for stream, progress in zip(self.streams, self._progress, strict=True):
            finished = stream.finished
            if finished is None:
                continue
            progress.num_cached_tokens = finished.num_cached_tokens
            if not finished.embedding:
                record.finish_reasons.append(finished.reason.value)
            record.was_cut_by_limit |= finished.detail == CREDIT_REFUSED
            record.num_preemptions += sum(event.kind is EventKind.PREEMPTED for event in finished.events)
            record.num_recomputed_tokens += finished.num_recomputed_tokens
            if finished.phases.scheduled_unix_ns:
                queues_ns.append(finished.phases.scheduled_unix_ns - finished.phases.received_unix_ns)
        if queues_ns:
            record.queue_ms = max(queues_ns) / 1e6
