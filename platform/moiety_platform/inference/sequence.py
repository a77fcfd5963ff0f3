"""One sequence of a request: what is asked, what has come of it, and the engine that it comes from now."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec

from moiety_platform.engine_client.base import Connection
from moiety_platform.engine_client.inbox import Delivery, Inbox
from moiety_platform.engine_client.stream import EngineStream
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
from moiety_platform.inference.placement import Place, Placement
from moiety_platform.inference.slo import SloProgress
from moiety_platform.routing.affinity import Prefix
from moiety_platform.routing.replica_breakers import RequestOutcome
from moiety_platform.routing.roles import Need, need_of
from moiety_wire.classes import ServiceClass
from moiety_wire.messages import Accepted, Finished, FinishReason, Submit, Tokens

MAX_FIRST_STEP_DEATHS = 2  # of engines: a request without a grammar is suspected then


class Sequence:
    """Owned by its Run. It may be submitted to one engine after another: each goes on where the last one ended."""

    stream: EngineStream  # at the engine that has it; there is none before it is submitted

    def __init__(self, index: int, submit: Submit) -> None:
        self.index = index
        self.prefix = Prefix(submit.cache_salt, submit.prompt_ids)
        self.progress = SloProgress(len(submit.prompt_ids) + submit.sibling_tokens)  # for which its promise allows time
        self.max_tokens = submit.stopping.max_tokens
        self.context_tokens = len(submit.prompt_ids) + submit.stopping.max_tokens  # what its engine must hold
        self.accepted: Accepted | None = None  # the first verdict
        self.failure: PlatformError | None = None  # that made it move; until it has been taken in elsewhere
        self.attempt: EngineAttempt | None = None  # at the engine that has it
        self._num_first_step_deaths = 0  # of engines, known to have computed its first token then
        self.prefill_done: list[Finished] = []  # what engines said that others went on after
        self._place: Place | None = None
        self._no_more_expected: Callable[[], None] | None = None  # by the engine that is to go on with it
        self._was_handed_over = False  # to the engine that has it, and has not taken it in yet
        self._submit = submit
        self._output_ids: list[int] = []  # that came, from whichever engine
        self._connection: Connection | None = None
        self._is_taken_in = False  # by that engine
        self._was_taken_on_before = False  # by one that had it before
        self._cached_tokens: int | None = None  # as the first engine said, if output came from several
        self._held: AbstractAsyncContextManager[EngineStream] | None = None
        self._outcome: RequestOutcome | None = None  # at the engine that has it, for that engine's circuit breaker

    @property
    def request_id(self) -> str:
        """At every engine."""
        return self._submit.request_id

    @property
    def connection(self) -> Connection:
        """Of the engine that has it."""
        assert self._connection is not None, "submitted before it is read"
        return self._connection

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, exact once the stream has ended."""
        return self.stream.num_output_tokens

    @property
    def num_claimed_tokens(self) -> int:
        """Output tokens for which limits must have room: its credit, until it has come to its end."""
        finished = self.stream.finished
        goes_on = (FinishReason.ABORT, FinishReason.PREFILL_DONE)  # as after the former it may, elsewhere
        is_over = finished is not None and finished.reason not in goes_on
        return self.num_tokens if is_over else self.stream.credit_tokens

    @property
    def num_relayed(self) -> int:
        """Output tokens that were taken from the engines."""
        return len(self._output_ids)

    @property
    def output_ids(self) -> list[int]:
        """Those tokens."""
        return self._output_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._submit.prompt_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, as the engine that computed it for the first output found them."""
        return self.stream.num_cached_tokens if self._cached_tokens is None else self._cached_tokens

    @property
    def is_admitted(self) -> bool:
        """By the engine that has it, which has not failed it."""
        return self._is_taken_in and not self.stream.has_failed

    @property
    def was_taken_on(self) -> bool:
        """By the engine that has it, or by one before."""
        return self._was_taken_on_before or self.stream.is_taken_on

    @property
    def need(self) -> Need:
        """What it needs of engines from now on."""
        return need_of(self._submit) if not self._output_ids else need_of(self._with_output())

    async def submit_to(
        self,
        place: Place,
        inbox: Inbox[EngineStream],
        service: ServiceClass,
        placement: Placement,
        transfer_id: str = "",
    ) -> None:
        """Give it to an engine: as a new request, or, once it was admitted, in the class in which it is served and
        with what came of it. `transfer_id`: of its prompt's KV, which the engine before has sent there. Raises
        Unavailable if the engine is gone."""
        await self.close()
        earlier = None if self._connection is None else self.stream
        submit = self._submit if earlier is None or self.accepted is None else self._resumed(earlier, service)
        self._place, self._was_handed_over = place, False
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
        self.stream, self._connection, self._is_taken_in = stream, place.connection, False
        if earlier is None:
            return
        self._was_taken_on_before |= earlier.is_taken_on
        if earlier.num_output_tokens and self._cached_tokens is None:
            self._cached_tokens = earlier.num_cached_tokens
        if earlier.credit_is_last:
            stream.extend(stream.credit_tokens, last=True)

    def take(self, message: Delivery) -> None:
        """Remember what came."""
        if isinstance(message, Tokens):
            self._output_ids += message.token_ids
            if self._outcome is not None and self._outcome.is_trial:
                self._outcome.delivered()
        elif isinstance(message, Accepted):
            self.accepted, self.failure, self._is_taken_in = self.accepted or message, None, True
            self._was_handed_over = False
        elif isinstance(message, Finished):
            self._succeeded()

    def hand_over(self, finished: Finished) -> tuple[Place, str]:
        """Its engine has done its part: the engine that goes on, and under which id its KV went there, "" if it did
        not. Told once."""
        place = self._place
        assert place is not None and place.partner is not None and place.hand_over is not None, "else none hands over"
        self.prefill_done.append(finished)
        self._succeeded()
        self._place = None
        return place.partner, "" if finished.detail else place.hand_over.transfer_id

    def was_handed_over(self) -> None:
        """To the engine that it was just given to: if that does not take it in, another one may."""
        self._was_handed_over = True

    def note_failure(self, error: PlatformError, unix_ns: int) -> None:
        """Note that the engine ended it with that error, for the trace and for the engine's circuit breaker."""
        if self.attempt is not None:
            self.attempt.failed(error, unix_ns)
        if self._outcome is not None:
            self._outcome.failed(error)

    def fail(self, error: PlatformError) -> bool:
        """Take note of what its engine ended with; whether another engine may take it. `failure` is then what made it
        move, and not what engines said since: one that was admitted is not answered with another engine's refusal."""
        is_moving = (self.failure is not None or self._was_handed_over) and self.accepted is not None
        is_the_requests = isinstance(error, EngineRefused) and error.blames_request
        if self.failure is None or (isinstance(self.failure, EngineRefused) and not is_the_requests):
            self.failure = error  # of several, one after which the client may try again
        return is_moving or (isinstance(error, EngineFailed | Unavailable) and not is_the_requests)

    def suspicion_of(self, error: PlatformError) -> PlatformError | None:
        """The error for the client if the request may be what its engine died of, so that no other engine gets it.

        A request is suspected while an engine computes its first token there. With a grammar that the client chose, the
        first death is enough, unless an earlier engine got beyond that point; without one the second death is. Requests
        that waited, or that got tokens from the engine, are innocent. An engine that vanished whole cannot tell who
        waited: then a request with a grammar is suspected until its first token."""
        if not isinstance(error, EngineDied) or error.in_first_step is False or self._has_output_there():
            return None
        self._num_first_step_deaths += error.in_first_step is True
        has_grammar = self._submit.guide is not None and not self._output_ids
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
        """End it at its engine. Idempotent."""
        if self._no_more_expected is not None:
            self._no_more_expected()
            self._no_more_expected = None
        if self._outcome is not None:
            self._outcome.release()
        held, self._held = self._held, None
        if held is not None:
            await held.__aexit__(None, None, None)

    def _succeeded(self) -> None:
        if self._outcome is not None:
            self._outcome.succeeded()

    def _resumed(self, earlier: EngineStream, service: ServiceClass) -> Submit:
        return msgspec.structs.replace(
            self._with_output(), service=service, fallback=None, credit_tokens=earlier.credit_tokens
        )

    def _with_output(self) -> Submit:
        return msgspec.structs.replace(self._submit, resumed_ids=self._output_ids.copy())
