"""One sequence of a request: its input, its output so far, and its current engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from operator import add

import msgspec

from moiety_platform.engine_client.base import Connection
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.engine_client.stream import Delivery, EngineStream, ExpertBytes, Inbox
from moiety_platform.errors import (
    CRASH_SUSPECTED,
    BadRequest,
    EngineDied,
    EngineFailed,
    EngineRefused,
    PlatformError,
    Unavailable,
)
from moiety_platform.inference.engine_attempts import EngineAttempt
from moiety_platform.inference.engine_placement import Place, Placement
from moiety_platform.inference.slo import SloProgress
from moiety_platform.routing.choose import Prefix, RequestNeed, need_of
from moiety_platform.routing.circuit_breaker import RequestOutcome
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import Accepted, Finished, FinishReason, Submit, Tokens

MAX_FIRST_STEP_DEATHS = 2  # engine deaths after which a request without a grammar is suspected


class Sequence:
    """One sequence.

    Owned by its Run. It may be submitted to several engines in turn. Each continues the output of the last one.
    """

    stream: EngineStream  # at the current engine; unset before submission

    def __init__(self, index: int, submit: Submit) -> None:
        self.index = index
        self.request_id = submit.request_id  # at every engine
        self.prefix = Prefix(submit)
        self.progress = SloProgress(len(submit.prompt_ids) + submit.sibling_tokens)  # prompt tokens of the SLO
        self.num_prompt_tokens = len(submit.prompt_ids)
        self.max_tokens = submit.stopping.max_tokens
        self.context_tokens = len(submit.prompt_ids) + submit.stopping.max_tokens  # required context of the engine
        self.accepted: Accepted | None = None  # the first admission
        self.failure: PlatformError | None = None  # cause of a failover, until another engine admits the sequence
        self.attempt: EngineAttempt | None = None  # at the current engine
        self._num_first_step_deaths = 0  # engines that died while they computed the first token
        self.prefill_done: list[Finished] = []  # ends of prefill engines
        self._place: Place | None = None
        self._no_more_expected: Callable[[], None] | None = None  # ends the announcement at the decode engine
        self._is_handoff = False  # the current engine decodes after another's prefill, and has not admitted it yet
        self._submit = submit
        self.output_ids: list[int] = []  # received from all engines
        self._connection: Connection | None = None
        self._is_admitted_there = False  # admitted by that engine
        self._was_taken_on_before = False  # begun by an earlier engine
        self.earlier_expert_bytes = ExpertBytes()  # at earlier engines, except those that were lost
        self._cached_tokens: int | None = None  # from the first engine with output, after a failover
        self._held: AbstractAsyncContextManager[EngineStream] | None = None
        self._outcome: RequestOutcome | None = None  # at the current engine, for its circuit breaker

    @property
    def connection(self) -> Connection:
        """Connection of the current engine."""
        assert self._connection is not None, "submitted before it is read"
        return self._connection

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, exact once the stream has ended."""
        return self.stream.num_output_tokens

    @property
    def num_claimed_tokens(self) -> int:
        """Output tokens that need quota: the credit, or the exact count once the sequence has ended."""
        finished = self.stream.finished
        goes_on = (FinishReason.ABORT, FinishReason.PREFILL_DONE)  # may continue at another engine
        is_over = finished is not None and finished.reason not in goes_on
        return self.num_tokens if is_over else self.stream.credit_tokens

    @property
    def num_relayed(self) -> int:
        """Number of output tokens received from engines."""
        return len(self.output_ids)

    @property
    def num_counted_prompt_tokens(self) -> int:
        """Prompt tokens by the engine's count where it renders the prompt, once the sequence has ended."""
        finished = self.stream.finished
        if finished is None or not isinstance(self._submit, ChatSubmit):
            return self.num_prompt_tokens
        return finished.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held, at the engine that computed the first output."""
        return self.stream.num_cached_tokens if self._cached_tokens is None else self._cached_tokens

    @property
    def is_admitted(self) -> bool:
        """True if the current engine has admitted the sequence and not failed it."""
        return self._is_admitted_there and not self.stream.has_failed

    @property
    def was_begun(self) -> bool:
        """True if the current engine or an earlier one has begun the sequence."""
        return self._was_taken_on_before or self.stream.is_begun

    @property
    def need(self) -> RequestNeed:
        """Required engine features from now on."""
        return need_of(self._submit) if not self.output_ids else need_of(self._with_output())

    async def submit_to(
        self,
        place: Place,
        inbox: Inbox[EngineStream],
        service: ServiceClass,
        placement: Placement,
        transfer_id: str = "",
    ) -> None:
        """Submit the sequence to an engine.

        After an earlier admission it is submitted in its served class and with its output so far. `transfer_id`
        identifies the prompt's KV that the previous engine has sent there. Raises Unavailable if the engine is not
        connected.
        """
        await self.close()  # also the announcement of a submission that failed
        earlier = None if self._connection is None else self.stream
        submit = self._submit if earlier is None or self.accepted is None else self._resumed(earlier, service)
        self._place, self._is_handoff = place, False
        if transfer_id:
            submit = msgspec.structs.replace(submit, transfer_id=transfer_id)
        elif place.partner is not None:
            submit = msgspec.structs.replace(submit, hand_over=place.hand_over)
            self._no_more_expected = placement.expect(place.partner)
        held = place.client.open(submit, inbox)
        self._outcome = outcome = placement.begin(place)
        try:
            stream = await held.__aenter__()
        except PlatformError as error:
            outcome.failed(error)
            raise
        self._held = held
        self.stream, self._connection, self._is_admitted_there = stream, place.connection, False
        if earlier is None:
            return
        # only now: a submission that fails is repeated with the same earlier stream
        self.earlier_expert_bytes = ExpertBytes(*map(add, self.earlier_expert_bytes, earlier.expert_bytes))
        self._was_taken_on_before |= earlier.is_begun
        if earlier.num_output_tokens and self._cached_tokens is None:
            self._cached_tokens = earlier.num_cached_tokens
        if earlier.credit_is_last:
            stream.extend(stream.credit_tokens, last=True)

    def take(self, message: Delivery) -> None:
        """Record a message from the engine."""
        if isinstance(message, Tokens):
            self.output_ids += message.token_ids
            if self._outcome is not None and self._outcome.is_trial:
                self._outcome.delivered()
        elif isinstance(message, Accepted):
            self.accepted, self.failure, self._is_admitted_there = self.accepted or message, None, True
            self._is_handoff = False
        elif isinstance(message, Finished) and self._outcome is not None:
            self._outcome.succeeded()

    def hand_over(self, finished: Finished) -> tuple[Place, str]:
        """Record the end of the prefill engine.

        Returns the decode engine and the id of the KV transfer, "" if there was none. Called once.
        """
        place = self._place
        assert place is not None and place.partner is not None and place.hand_over is not None, (
            "only a prefill engine ends so"
        )
        self.prefill_done.append(finished)
        if self._outcome is not None:
            self._outcome.succeeded()
        self._place = None
        return place.partner, "" if finished.detail else place.hand_over.transfer_id

    def mark_handoff(self) -> None:
        """Mark the current engine as the decode engine. If it does not admit the sequence, another one may."""
        self._is_handoff = True

    def note_failure(self, error: PlatformError, unix_ns: int) -> None:
        """Record the engine's error for the trace and for the engine's circuit breaker."""
        if self.attempt is not None:
            self.attempt.failed(error, unix_ns)
        if self._outcome is not None:
            self._outcome.failed(error)

    def fail(self, error: PlatformError) -> bool:
        """Record the engine's error, and return whether another engine may continue.

        `failure` is then the cause of the failover, not a later engine's error: a sequence that was admitted is not
        answered with another engine's refusal.
        """
        is_moving = (self.failure is not None or self._is_handoff) and self.accepted is not None
        is_the_requests = isinstance(error, EngineRefused) and error.blames_request
        if self.failure is None or (isinstance(self.failure, EngineRefused) and not is_the_requests):
            self.failure = error  # of several errors, prefer one that the client may retry
        return is_moving or (isinstance(error, EngineFailed | Unavailable) and not is_the_requests)

    def suspicion_of(self, error: PlatformError) -> PlatformError | None:
        """Return the client's error if the request may have crashed its engine, so that no other engine gets it.

        A request is suspected while an engine computes its first token there. With a grammar that the client chose, the
        first crash is enough, unless an earlier engine got beyond that point. Without a grammar two crashes are needed.
        Requests that waited or got tokens from the engine are not suspected. An engine that vanished completely cannot
        report which requests waited: a request with a grammar is then suspected until its first token.
        """
        if not isinstance(error, EngineDied) or error.in_first_step is False or self._has_output_there():
            return None
        self._num_first_step_deaths += error.in_first_step is True
        has_grammar = self._submit.grammar is not None and not self.output_ids
        if not has_grammar and self._num_first_step_deaths < MAX_FIRST_STEP_DEATHS:
            return None
        cause = "grammar (response_format, structured_outputs or strict tools)" if has_grammar else "parameters"
        return BadRequest(
            "the engine died before the first token of this request and may have died of it, so no other engine gets "
            f"the request; change its {cause}",
            code=CRASH_SUSPECTED,
        )

    def _has_output_there(self) -> bool:
        return self.attempt is not None and self.stream.num_output_tokens > self.attempt.num_resumed_tokens

    async def close(self) -> None:
        """End the sequence at its engine. Idempotent."""
        if self._no_more_expected is not None:
            self._no_more_expected()
            self._no_more_expected = None
        if self._outcome is not None:
            self._outcome.release()
        held, self._held = self._held, None
        if held is not None:
            await held.__aexit__(None, None, None)

    def _resumed(self, earlier: EngineStream, service: ServiceClass) -> Submit:
        return msgspec.structs.replace(
            self._with_output(), service=service, fallback=None, credit_tokens=earlier.credit_tokens
        )

    def _with_output(self) -> Submit:
        return msgspec.structs.replace(self._submit, resumed_ids=self.output_ids.copy())
