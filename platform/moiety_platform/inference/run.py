"""Submitted request: its sequences, their outputs and their cost. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

import msgspec

from moiety_platform.admission.gate import AdmissionSlot
from moiety_platform.classes.terms import ChosenClass
from moiety_platform.clock import Clock
from moiety_platform.engine_client.stream import Delivery, EngineStream, Inbox
from moiety_platform.errors import PlatformError, Unavailable
from moiety_platform.inference.engine_attempts import EngineAttempt
from moiety_platform.inference.engine_placement import Place, Placement
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.quota_reservation import Throttled
from moiety_platform.inference.request_record import Failover, RequestRecord
from moiety_platform.inference.sequence import Sequence
from moiety_platform.routing.prefix_names import SLICE_TOKENS
from moiety_text.reasoning import AnswerReader
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import Accepted, Finished, FinishReason, Submit, Tokens
from moiety_wire.trace_events import EventKind

CREDIT_REFUSED = "credit_refused"  # the detail of an end for want of credit
_is_admitted = attrgetter("is_admitted")
SHARED_PREFIX_PART = 16  # a choice with names that are hashed takes less than this part of the time to hash them
STOP_TOKEN = "stop_token"  # the detail of an end by a token that is not text


class Usage(msgspec.Struct, frozen=True):
    """Usage of a request, in tokens. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int | None = None  # of the output; None where the model is not known to think


@dataclass(eq=False, repr=False)
class InferenceRun:
    """A submitted request: iterate for (index of the sequence, message) until every sequence has finished.

    Enter it as a context: on exit every sequence has ended at its engine, and is counted in the record.

    Credit is extended when the reader comes back for more, that is after it has relayed what it got; so a client that
    reads slowly pauses its sequences instead of filling memory.

    A sequence whose engine fails it is submitted to another with the output that has come, and goes on after it; the
    reader sees nothing of it. Raises what the engine failed with where there is no other.
    """

    record: RequestRecord
    chosen: ChosenClass
    prompts: list[list[int]]
    billed_tokens: list[int]  # of each prompt
    text: ModelText
    placement: Placement
    clock: Clock
    credit_window: int
    gate_place: AdmissionSlot

    def __post_init__(self) -> None:
        self._num_prompt_tokens = sum(self.billed_tokens)
        self._inbox: Inbox[EngineStream] = Inbox()
        self._sequences: list[Sequence] = []
        self._to_close: list[Sequence] = []
        self._of_stream: dict[EngineStream, Sequence] = {}
        self._early: deque[tuple[Sequence, Delivery]] = deque()  # came before the last verdict
        self._num_open = 0
        self._num_hashed_tokens = 0  # of prompts, since other tasks of the event loop ran
        self._relayed: Sequence | None = None  # its tokens were returned last

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def new_readers(self) -> list[AnswerReader] | None:
        """Return readers of tool calls and reasoning for each sequence; None where there can be neither."""
        generation = self.record.generation
        assert generation is not None, "known before the request is submitted"
        return self.text.new_readers(generation, self.prompts)

    async def submit(self, submit: Submit) -> None:
        """Give a sequence to an engine, where `close` ends it. Raises NotFound or Unavailable."""
        sequence = Sequence(len(self._sequences), submit)
        self._to_close.append(sequence)
        cost_tokens, is_shared = sequence.num_prompt_tokens, False
        if self._sequences:
            prefix = self._sequences[-1].prefix
            if is_shared := prefix.is_of(submit):
                sequence.prefix, cost_tokens = prefix, cost_tokens // SHARED_PREFIX_PART
            if self._num_hashed_tokens + cost_tokens > SLICE_TOKENS:
                self._num_hashed_tokens = 0
                await asyncio.sleep(0)
        self._num_hashed_tokens += cost_tokens
        if sequence.num_prompt_tokens > SLICE_TOKENS and not is_shared:
            await self.placement.hash_prefix(sequence.prefix)
        place = self.placement.choose(sequence.prefix, sequence.need, sequence.context_tokens)
        try:
            await self._submit_to(sequence, place, self.chosen.service)
        except Unavailable as error:  # gone since it was last heard
            self.placement.exclude_engine(place.connection, error)
            await self._submit_elsewhere(sequence, error)
        self._sequences.append(sequence)
        self._of_stream[sequence.stream] = sequence
        self._num_open += 1

    async def wait_admitted(self) -> None:
        """Wait until every sequence is admitted; outputs that arrive meanwhile are kept for the reader.

        Raises the error of an engine that refuses one of them; then none may be answered.
        """
        while not all(map(_is_admitted, self._sequences)):
            self._early.append(await self._receive())
        for sequence in self._sequences:
            assert sequence.accepted is not None
            self.record.admitted(self._served(sequence), sequence.accepted.reason)

    async def wait_first_finished(self) -> None:
        """Return when the first sequence has ended; what comes meanwhile is kept for the reader. Raises as above."""
        first = self._sequences[0]
        while first.stream.finished is None:
            self._early.append(await self._receive())

    async def wait_first_output(self) -> None:
        """Return when a sequence has output or has ended; what comes meanwhile is kept for the reader.

        Raises the error of a sequence that no engine takes on.
        """
        while not any(not isinstance(message, Accepted) for _, message in self._early):
            self._early.append(await self._receive())

    async def __aenter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Tokens | Finished]:
        relayed, self._relayed = self._relayed, None
        if relayed is not None and relayed.stream.credit_tokens < relayed.max_tokens:
            await self._extend(relayed)
        if self._num_open == 0:
            raise StopAsyncIteration
        while True:
            sequence, message = self._early.popleft() if self._early else await self._receive()
            if not isinstance(message, Accepted):
                break
        record, now_s = self.record, self.clock.monotonic()
        if isinstance(message, Finished):
            self._num_open -= 1
            if message.expert_profile:
                self.placement.learn_experts(sequence.prefix, message.expert_profile)
            if message.embedding:  # the only message for a prompt that is embedded
                sequence.progress.take(1, now_s - record.started_s)
        else:
            self._relayed = sequence
            record.last_token_s = now_s
            if record.first_token_s is None:
                record.first_token_s = now_s
            sequence.progress.take(len(message.token_ids), now_s - record.started_s)
        return sequence.index, message

    async def _receive(self) -> tuple[Sequence, Delivery]:
        """Return the next message for any sequence, from any engine."""
        inbox = self._inbox
        while True:
            stream, message = inbox.deliveries.popleft() if inbox.deliveries else await inbox.get_any()
            sequence = self._of_stream[stream]
            if isinstance(message, PlatformError):
                await self._fail_over(sequence, message)
            elif isinstance(message, Finished) and message.reason is FinishReason.PREFILL_DONE:
                await self._hand_over(sequence, message)
            else:
                sequence.take(message)
                return sequence, message

    async def _hand_over(self, sequence: Sequence, finished: Finished) -> None:
        """Submit a sequence whose prompt is computed to its decode engine, or, if that is gone, to any other.

        Raises Unavailable if there is none.
        """
        partner, transfer_id = sequence.hand_over(finished)
        del self._of_stream[sequence.stream]
        try:
            await self._submit_to(sequence, partner, self._served(sequence), transfer_id)
            sequence.mark_handoff()
        except Unavailable as error:
            self.placement.exclude_engine(partner.connection, error)
            await self._submit_elsewhere(sequence, error)
            self._note_failover(sequence, error, partner.connection[0])
        self._of_stream[sequence.stream] = sequence
        await self._extend(sequence)

    async def _fail_over(self, sequence: Sequence, error: PlatformError) -> None:
        """Submit a sequence that its engine has ended with that error to another engine.

        Raises the error if the engine did not cause it, and the cause of the failover if no other engine accepts it.
        """
        sequence.note_failure(error, self.clock.unix_ns())
        if (suspicion := sequence.suspicion_of(error)) is not None:
            raise suspicion
        if not sequence.fail(error):
            raise error
        del self._of_stream[sequence.stream]
        self.placement.exclude_engine(sequence.connection, error)
        failed_address, _ = sequence.connection
        await self._submit_elsewhere(sequence, sequence.failure or error)
        self._of_stream[sequence.stream] = sequence
        self._note_failover(sequence, error, failed_address)
        await self._extend(sequence)  # what was granted while the engine died went to nobody

    def _note_failover(self, sequence: Sequence, error: PlatformError, failed_address: str) -> None:
        self.record.failed_over(
            Failover(error.code, failed_address, sequence.connection[0], sequence.num_relayed, self.clock.unix_ns()),
            sequence.num_prompt_tokens + sequence.num_relayed if sequence.num_relayed else 0,
        )

    async def _submit_elsewhere(self, sequence: Sequence, failure: PlatformError) -> None:
        while True:
            place = await self.placement.choose_again(sequence.prefix, sequence.need, failure, sequence.context_tokens)
            try:
                await self._submit_to(sequence, place, self._served(sequence))
            except Unavailable as error:
                self.placement.exclude_engine(place.connection, error)
            else:
                return

    async def _submit_to(self, sequence: Sequence, place: Place, service: ServiceClass, transfer_id: str = "") -> None:
        submitted_ns = self.clock.unix_ns()
        await sequence.submit_to(place, self._inbox, service, self.placement, transfer_id)
        self.record.submitted(place.client, sequence.request_id)
        sequence.attempt = EngineAttempt(
            sequence.index, place.connection[0], sequence.stream, sequence.num_relayed, submitted_ns
        )
        self.record.attempts.append(sequence.attempt)

    def _served(self, sequence: Sequence) -> ServiceClass:
        """Return the class that the sequence was admitted to, or else the chosen one."""
        accepted = sequence.accepted
        return self.chosen.service if accepted is None else self.chosen.served(accepted.served_class)

    async def _extend(self, sequence: Sequence) -> None:
        """Keep a window of credit ahead of what was relayed, renewed by halves, so that few messages are needed.

        Where a quota is exhausted, the sequence ends with the credit that it has.
        """
        window, stream = self.credit_window, sequence.stream
        if stream.ended or stream.credit_is_last or stream.num_unused_credit_tokens > window // 2:
            return
        more = min(sequence.max_tokens, stream.num_output_tokens + window) - stream.credit_tokens
        if more <= 0:
            return
        reserved = self._num_prompt_tokens + sum(other.num_claimed_tokens for other in self._sequences)
        reservation = self.record.reservation
        if stream.credit_tokens > stream.num_output_tokens:
            try:
                granted = await reservation.extend(reserved, more)
            except (Throttled, Unavailable):
                return  # there is credit left: asked again with the next tokens
        else:
            self.record.was_paused = True
            granted = await reservation.extend_or_wait(reserved, more)
        stream.extend(stream.credit_tokens + granted, last=granted == 0)

    def whole_answer(self) -> list[int] | None:
        """Return the tokens of the request's only answer, without the stop token; None unless it ended by itself."""
        (sequence,) = self._sequences
        finished = sequence.stream.finished
        if finished is None or finished.reason is not FinishReason.STOP:
            return None
        return sequence.output_ids[:-1] if finished.detail == STOP_TOKEN else sequence.output_ids

    def usage(self) -> Usage:
        """Return the usage so far; exact when every stream has ended."""
        num_choices = max(1, len(self._sequences) // len(self.prompts))
        prompt_tokens, cached_tokens, output_tokens = self._num_prompt_tokens, 0, 0
        for number, sequence in enumerate(self._sequences):
            prompt_number, choice = divmod(number, num_choices)
            if self.billed_tokens[prompt_number] < len(self.prompts[prompt_number]):
                continue  # a further option of a question, of which the engine generates nothing that is read
            output_tokens += sequence.stream.num_output_tokens
            if choice == 0:
                prompt_tokens += sequence.num_counted_prompt_tokens - sequence.num_prompt_tokens
                cached_tokens += sequence.num_cached_tokens
        thought_tokens = self._num_thought_tokens() if self.text.thinks else None
        return Usage(prompt_tokens, cached_tokens, output_tokens, thought_tokens)

    @property
    def output_ids(self) -> list[list[int]]:
        """Output tokens of each sequence so far."""
        return [sequence.output_ids for sequence in self._sequences]

    def output_ids_of(self, index: int) -> list[int]:
        """Return the output tokens of one sequence so far."""
        return self._sequences[index].output_ids

    def usage_so_far(self, index: int) -> Usage:
        """Return the usage of one sequence and its prompt, by the tokens that were returned."""
        sequence = self._sequences[index]
        return Usage(sequence.num_prompt_tokens, sequence.num_cached_tokens, sequence.num_relayed)

    def _num_thought_tokens(self) -> int | None:
        if self.record.generation is None:
            return None
        return self.text.num_thought_tokens(self.record.generation, self.prompts, self.output_ids)

    def abort(self) -> None:
        """End every sequence at its engine, where it has not ended."""
        for sequence in self._sequences:
            sequence.stream.abort()

    async def close(self, *_: object) -> None:
        """End every sequence at its engine, count it in the record, and release the request's place at the gate."""
        try:
            await self._end_all()
        finally:
            self.gate_place.release()

    __aexit__ = close

    async def _end_all(self) -> None:
        if self._num_open:
            self.abort()
        try:
            while self._to_close:
                await self._to_close.pop().close()
        except BaseException:  # the others are ended nevertheless
            await self._end_all()
            raise
        self._settle()

    def _settle(self) -> None:
        """Put what the sequences came to into the record."""
        record, usage = self.record, self.usage()
        record.cached_tokens, record.output_tokens = usage.cached_tokens, usage.output_tokens
        if record.reached_engine:
            record.prompt_tokens = usage.prompt_tokens
        record.progress, record.was_begun, queues_ns = [], False, []
        record.prompt_ids, record.output_ids = self.prompts, []
        for sequence in self._sequences:
            record.progress.append(sequence.progress)
            record.output_ids.append(sequence.output_ids)
            record.was_begun |= sequence.was_begun
            sequence.progress.num_cached_tokens = sequence.num_cached_tokens
            for at_engines in (sequence.earlier_expert_bytes, sequence.stream.expert_bytes):
                record.expert_read_bytes += at_engines.read
                record.expert_moved_bytes += at_engines.moved
            finished = sequence.stream.finished
            parts = sequence.prefill_done
            if finished is not None and finished not in parts:
                parts = [*parts, finished]
            for part in parts:
                for event in part.events:
                    record.num_preemptions += event.kind is EventKind.PREEMPTED
                record.num_recomputed_tokens += part.num_recomputed_tokens
                record.num_speculative_tokens += part.num_speculative_tokens
            if parts and parts[0].phases.scheduled_unix_ns:
                queues_ns.append(parts[0].phases.scheduled_unix_ns - parts[0].phases.received_unix_ns)
            if finished is None or finished.reason is FinishReason.PREFILL_DONE:
                continue
            if not finished.embedding:
                record.finish_reasons.append(str(finished.reason))
            record.was_cut_by_limit |= finished.detail == CREDIT_REFUSED
        if queues_ns:
            record.queue_ms = max(queues_ns) / 1e6
