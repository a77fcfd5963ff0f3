"""The life of a request, from what is asked to its last token. Knows no HTTP and no API's field names.

tokenize → check the context → choose a replica → submit every sequence → merge what comes → settle the counts
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Self

import msgspec

from moiety_platform.clock import Clock
from moiety_platform.completions.generation import Generation, seed_of_choice
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.text import ModelText, ModelTexts
from moiety_platform.engine_client.inbox import Inbox
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import BadRequest, ContextTooLong, NotFound
from moiety_platform.routing.choose import MODEL_NOT_FOUND, model_not_found
from moiety_platform.routing.replicas import Replicas
from moiety_wire.messages import Card, Finished, Stopping, Submit, Tokens


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
        self, record: RequestRecord, prompts: list[list[int]], text: ModelText, clock: Clock, credit_window: int
    ) -> None:
        self.prompts = prompts
        self.text = text
        self._record = record
        self._clock = clock
        self._credit_window = credit_window
        self.inbox = Inbox[EngineStream]()
        self.streams: list[EngineStream] = []
        self._index: dict[EngineStream, int] = {}
        self._num_open = 0
        self._max_tokens: list[int] = []
        self._relaying: EngineStream | None = None

    def add(self, stream: EngineStream, max_tokens: int) -> None:
        self._index[stream] = len(self.streams)
        self.streams.append(stream)
        self._max_tokens.append(max_tokens)
        self._num_open += 1

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Tokens | Finished]:
        if self._relaying is not None:
            self._extend(self._relaying)
            self._relaying = None
        if self._num_open == 0:
            raise StopAsyncIteration
        stream, message = await self.inbox.get()
        if isinstance(message, Finished):
            self._num_open -= 1
        else:
            self._relaying = stream
            self._record.last_token_s = now_s = self._clock.monotonic()
            if self._record.first_token_s is None:
                self._record.first_token_s = now_s
        return self._index[stream], message

    def _extend(self, stream: EngineStream) -> None:
        """Keep a window of credit ahead of what was relayed; renewed by halves, so that few messages are needed."""
        window = self._credit_window
        if stream.credit_tokens - stream.num_output_tokens <= window // 2:
            limit = self._max_tokens[self._index[stream]]
            stream.extend(min(limit, stream.num_output_tokens + window))

    def usage(self) -> Usage:
        """What has been generated so far; exact when every stream has ended."""
        ends = [stream.finished for stream in self.streams[:: max(1, len(self.streams) // len(self.prompts))]]
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            cached_tokens=sum(end.num_cached_tokens for end in ends if end is not None),
            output_tokens=sum(stream.num_output_tokens for stream in self.streams),
        )


class Pipeline:
    """Carries out generations for one gateway process."""

    def __init__(
        self, replicas: Replicas, texts: ModelTexts, clock: Clock, *, credit_window: int, max_sequences: int
    ) -> None:
        self._replicas = replicas
        self._texts = texts
        self._clock = clock
        self._credit_window = credit_window
        self._max_sequences = max_sequences

    @asynccontextmanager
    async def run(self, record: RequestRecord, generation: Generation) -> AsyncIterator[Run]:
        """Submit and hold a request. However this is left, every sequence is ended at its engine and counted in the
        record. Raises the errors of `moiety_platform.errors`."""
        record.generation = generation
        with record.span.child("admission"):
            card = self._card(record, generation.model)
            text = await self._texts.get(card)
            self._check_limits(generation, card)
            prompts = await text.encode(generation.prompts)
            submits = [
                submit
                for number, prompt_ids in enumerate(prompts)
                for submit in self._submits(record, generation, card, number, prompt_ids)
            ]
            client, _ = self._replicas.choose(generation.model)
        num_prompt_tokens = sum(map(len, prompts))
        run = Run(record, prompts, text, self._clock, self._credit_window)
        try:
            async with AsyncExitStack() as stack:
                for submit in submits:
                    stream = await stack.enter_async_context(client.open(submit, run.inbox))
                    record.submitted(num_prompt_tokens)
                    run.add(stream, submit.stopping.max_tokens)
                try:
                    yield run
                finally:
                    for stream in run.streams:  # all at once, before any is waited for
                        stream.abort()
        finally:
            _settle(record, run)

    def _card(self, record: RequestRecord, model: str) -> Card:
        allowed = record.principal.allowed_models
        if allowed is not None and model not in allowed:
            served = sorted(allowed & self._replicas.cards().keys())
            raise NotFound(model_not_found(model[:256], served), code=MODEL_NOT_FOUND, param="model")
        card = self._replicas.choose(model)[1]
        record.served_model = card.model
        return card

    def _check_limits(self, generation: Generation, card: Card) -> None:
        if generation.num_sequences > self._max_sequences:
            raise BadRequest(
                f"{len(generation.prompts)} prompts × n={generation.num_choices} are {generation.num_sequences} "
                f"sequences; a request may have {self._max_sequences}. Split it into several",
                param="n",
            )
        num_logprobs = generation.sampling.num_logprobs
        if num_logprobs is not None and num_logprobs > card.max_num_logprobs:
            raise BadRequest(f"this model gives at most {card.max_num_logprobs} alternatives a token; ask for fewer")
        for name, ids in (
            ("logit_bias", generation.sampling.logit_bias),
            ("stop_token_ids", generation.stop_token_ids),
        ):
            if (largest := max(ids, default=0)) >= card.vocab_size:
                raise BadRequest(
                    f"'{name}' has the token id {largest}; the model's are below {card.vocab_size}", param=name
                )

    def _submits(
        self, record: RequestRecord, generation: Generation, card: Card, number: int, prompt_ids: list[int]
    ) -> list[Submit]:
        max_tokens = _max_tokens(generation, card, len(prompt_ids))
        stopping = Stopping(
            max_tokens=max_tokens,
            min_tokens=min(generation.min_tokens, max_tokens),
            stop=generation.stop,
            stop_token_ids=generation.stop_token_ids,
            ignore_eos=generation.ignore_eos,
        )
        seed = generation.sampling.seed
        first = number * generation.num_choices
        return [
            Submit(
                request_id=f"{record.request_id}-{first + choice}",
                seq=0,
                model=card.model,
                tenant_id=record.principal.tenant_id,
                service_class=record.principal.service_class,
                prompt_ids=prompt_ids,
                sampling=msgspec.structs.replace(generation.sampling, seed=seed_of_choice(seed, choice))
                if choice
                else generation.sampling,
                stopping=stopping,
                credit_tokens=min(max_tokens, self._credit_window),
                cache_salt=record.principal.cache_salt,
                arrival_unix_ns=record.arrival_unix_ns,
                tenant_weight=record.principal.weight,
                traceparent=record.span.traceparent,
            )
            for choice in range(generation.num_choices)
        ]


def _max_tokens(generation: Generation, card: Card, num_prompt_tokens: int) -> int:
    """How many tokens may follow the prompt. Raises ContextTooLong, which names both lengths."""
    left = card.max_context_tokens - num_prompt_tokens
    wanted = generation.max_tokens if generation.max_tokens is not None else max(1, left)
    if wanted > left:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens} tokens and {wanted} are asked for, together "
            f"{num_prompt_tokens + wanted}; the model's context is {card.max_context_tokens} tokens. "
            "Shorten the prompt or lower max_tokens"
        )
    return wanted


def _settle(record: RequestRecord, run: Run) -> None:
    """Put what the streams counted into the record."""
    usage = run.usage()
    record.cached_tokens, record.output_tokens = usage.cached_tokens, usage.output_tokens
    queues_ns = []
    for stream in run.streams:
        if stream.finished is None:
            continue
        record.finish_reasons.append(stream.finished.reason.value)
        phases = stream.finished.phases
        if phases.scheduled_unix_ns:
            queues_ns.append(phases.scheduled_unix_ns - phases.received_unix_ns)
    if queues_ns:
        record.queue_ms = max(queues_ns) / 1e6
