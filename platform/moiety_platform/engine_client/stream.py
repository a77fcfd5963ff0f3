"""One request at an engine as the gateway sees it: its messages, its remaining credit, and its end.

The stream checks that no message was lost: sequence numbers and positions have no gaps. Every engine client creates
streams of this class and feeds them with `deliver` or `fail`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, NamedTuple, TypeVar

from moiety_platform.errors import (
    UNSUPPORTED_RESPONSE_FORMAT,
    BadRequest,
    ContextTooLong,
    EngineDied,
    EngineFailed,
    NonFiniteOutput,
    NotFound,
    Overloaded,
    PlatformError,
    Unavailable,
)
from moiety_wire.messages import (
    Abort,
    Accepted,
    Extend,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Submit,
    Tokens,
)

Sender = TypeVar("Sender")
Delivery = Accepted | Tokens | Finished

_REFUSALS = {
    FailureCode.GRAMMAR_REFUSED: UNSUPPORTED_RESPONSE_FORMAT,
    FailureCode.ADAPTER_REFUSED: "adapter_refused",
    FailureCode.IMAGE_REFUSED: "invalid_image",
}
ABORT_WAIT_S = 6.0  # longer than an engine step and than the silence limit of the connection


class Inbox(Generic[Sender]):
    """Deliveries in order of arrival. Its size is bounded by the credit of the streams that share it."""

    def __init__(self) -> None:
        self.deliveries: deque[tuple[Sender, Delivery | PlatformError]] = deque()  # not read yet
        self._reader: asyncio.Future[None] | None = None

    def put(self, stream: Sender, message: Delivery | PlatformError) -> None:
        self.deliveries.append((stream, message))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> tuple[Sender, Delivery]:
        """Return the next delivery. Raises the error of a failed stream."""
        stream, message = await self.get_any()
        if isinstance(message, Exception):
            raise message
        return stream, message

    async def get_any(self) -> tuple[Sender, Delivery | PlatformError]:
        """Return the next delivery, or the error of a failed stream, which is its last delivery."""
        while not self.deliveries:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self.deliveries.popleft()


class ExpertBytes(NamedTuple):
    """Bytes of experts' weights that a sequence read and moved at an engine, as the engine charged them."""

    read: int = 0
    moved: int = 0


class EngineStream:
    """Stream of one request.

    Owned by the opener. `num_output_tokens`, including resumed tokens, is exact once `ended`.
    """

    def __init__(
        self, submit: Submit, inbox: Inbox[EngineStream] | None, send: Callable[[Extend | Abort], None]
    ) -> None:
        self.request_id = submit.request_id
        self.inbox: Inbox[EngineStream] = Inbox() if inbox is None else inbox
        self.credit_tokens = submit.credit_tokens
        self.credit_is_last = False  # no further credit follows
        self.num_output_tokens = len(submit.resumed_ids or ())
        self.num_cached_tokens = 0
        self.expert_bytes = ExpertBytes()  # of experts, once the stream has ended
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.ended = False
        self.begins_by_output = False  # True if only output proves that the engine has begun the request
        self._num_resumed = len(submit.resumed_ids or ())
        self._send = send
        self._embeds = submit.embed
        self._may_hand_over = submit.hand_over is not None
        self._next_seq_in = 0
        self._next_seq_out = submit.seq + 1
        self._aborted = False
        self._abort_error: PlatformError | None = None  # for the reader, once the engine has ended the request
        self._end_waiter: asyncio.Future[None] | None = None

    @property
    def num_unused_credit_tokens(self) -> int:
        """Output tokens that the engine may generate without more credit."""
        return self.credit_tokens - self.num_output_tokens

    @property
    def wants_more(self) -> bool:
        """True if the stream has neither ended nor been aborted."""
        return not (self.ended or self._aborted)

    @property
    def is_begun(self) -> bool:
        """True if the engine has begun the request, so that there is usage to bill."""
        if not self.begins_by_output:
            return self.accepted is not None
        has_ended_itself = self.finished is not None and self.finished.reason is not FinishReason.ABORT
        return has_ended_itself or self.num_output_tokens > self._num_resumed

    @property
    def has_failed(self) -> bool:
        """True if the stream ended with an error, which is in the inbox or was read from it."""
        return self.ended and self.finished is None

    def extend(self, credit_tokens: int, *, last: bool = False) -> None:
        """Raise the total credit of output tokens. With `last` the request ends when the credit is used up."""
        if self.ended or self.credit_is_last or (credit_tokens <= self.credit_tokens and not last):
            return
        self.credit_tokens, self.credit_is_last = credit_tokens, last
        self._send(Extend(self.request_id, self._take_seq(), credit_tokens, last))

    def abort(self, error: PlatformError | None = None) -> None:
        """Ask the engine to end the request now. Its `Finished` still follows, with the exact count.

        With an error, the reader gets that in place of the `Finished`.
        """
        if self.ended or self._aborted:
            return
        self._aborted, self._abort_error = True, error
        self._send(Abort(self.request_id, self._take_seq()))

    def deliver(self, message: Accepted | Tokens | Finished | Failed) -> None:
        """Process the engine's next message for this request."""
        if self.ended:
            return
        if message.seq != self._next_seq_in:
            self._break(f"message {message.seq} arrived instead of {self._next_seq_in}")
            return
        self._next_seq_in += 1
        if type(message) is Tokens:
            if self.accepted is None:
                self._break("tokens arrived before the admission decision")
                return
            if message.position != self.num_output_tokens:
                self._break(f"tokens arrived from position {message.position} instead of {self.num_output_tokens}")
                return
            self.num_output_tokens += len(message.token_ids)
            self.num_cached_tokens = self.num_cached_tokens or message.num_cached_tokens
            if self.num_output_tokens > self.credit_tokens:
                self._break(f"{self.num_output_tokens} tokens arrived for a credit of {self.credit_tokens}")
                return
            self.inbox.put(self, message)
        elif type(message) is Accepted:
            self.accepted = message
            self.inbox.put(self, message)
        elif type(message) is Finished:
            self._take_finished(message)
        elif type(message) is Failed:
            self.num_output_tokens = max(self.num_output_tokens, message.num_output_tokens)
            self.expert_bytes = ExpertBytes(message.expert_read_bytes, message.expert_moved_bytes)
            self.fail(error_of(message))

    def fail(self, error: PlatformError) -> None:
        """End the stream with an error. The tokens received so far are its usage."""
        if not self.ended:
            self._end()
            self.inbox.put(self, error)

    def was_not_sent(self) -> None:
        """End the stream of a request that was never sent, so no end will arrive. The owner handles the error."""
        self._end()

    async def wait_ended(self, timeout_s: float) -> None:
        """Return when the stream has ended, or after the timeout. A cancellation meanwhile is raised only then."""
        if self.ended:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._end_waiter = loop.create_future()
        cancelled: asyncio.CancelledError | None = None
        while not self.ended and (left_s := deadline - loop.time()) > 0:
            try:
                await asyncio.wait({self._end_waiter}, timeout=left_s)
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled

    async def messages(self) -> AsyncIterator[Tokens | Finished]:
        """Yield all messages to the end. Only for a stream with its own inbox."""
        while True:
            _, message = await self.inbox.get()
            if isinstance(message, Accepted):
                continue
            yield message
            if type(message) is Finished:
                return

    def _take_finished(self, message: Finished) -> None:
        if self._embeds and message.reason is not FinishReason.ABORT and not message.embedding:
            self._break("an embedding ended without its vector")
            return
        if message.reason is FinishReason.PREFILL_DONE and not self._may_hand_over:
            self._break("the engine transferred a request for which no decode engine was chosen")
            return
        self.num_output_tokens, self.num_cached_tokens = message.num_output_tokens, message.num_cached_tokens
        self.expert_bytes = ExpertBytes(message.expert_read_bytes, message.expert_moved_bytes)
        self.finished = message
        self._end()
        if message.reason is FinishReason.ABORT and not self._aborted:
            self.inbox.put(self, _unasked_end(message))
        elif message.reason is FinishReason.ABORT and self._abort_error is not None:
            self.inbox.put(self, self._abort_error)
        else:
            self.inbox.put(self, message)

    def _break(self, what: str) -> None:
        self.abort()
        self.fail(EngineFailed(f"the engine broke the protocol: {what}", code="engine_protocol_violation"))

    def _end(self) -> None:
        self.ended = True
        if self._end_waiter is not None and not self._end_waiter.done():
            self._end_waiter.set_result(None)

    def _take_seq(self) -> int:
        seq = self._next_seq_out
        self._next_seq_out += 1
        return seq


def _unasked_end(finished: Finished) -> PlatformError:
    """Return the error for an end that this gateway did not request.

    Either the engine shut down, or it considered this gateway dead.
    """
    if finished.detail == FailureCode.DRAINING:
        return Unavailable("the engine was shut down; send the request again", code="engine_draining", retry_after_s=1)
    return EngineFailed(f"the engine ended the request by itself: {finished.detail or 'abort'}")


def error_of(failed: Failed) -> PlatformError:
    """Return the platform's error for an engine's rejection or failure."""
    match failed.code:
        case FailureCode.UNKNOWN_MODEL:
            return NotFound(failed.message, code="model_not_found", param="model")
        case FailureCode.CONTEXT_LENGTH_EXCEEDED:
            return ContextTooLong(failed.message)
        case (
            FailureCode.INVALID_REQUEST
            | FailureCode.GRAMMAR_REFUSED
            | FailureCode.ADAPTER_REFUSED
            | FailureCode.IMAGE_REFUSED
        ):
            return BadRequest(failed.message, code=_REFUSALS.get(failed.code))
        case FailureCode.OVERLOADED:
            return _overload_of(failed)
        case FailureCode.DRAINING | FailureCode.ADAPTER_MISSING | FailureCode.IMAGES_MISSING:
            code = "engine_draining" if failed.code is FailureCode.DRAINING else failed.code.value
            return Unavailable(failed.message, code=code, retry_after_s=1)
        case FailureCode.NON_FINITE | FailureCode.ENGINE_FAILED:
            return _failure_of(failed)


def _failure_of(failed: Failed) -> PlatformError:
    """Return the error of a failed engine. `in_first_step` is set if its core died, not if the engine shut down."""
    if failed.code is FailureCode.NON_FINITE:
        return NonFiniteOutput(failed.message)
    if failed.in_first_step is None:
        return EngineFailed(failed.message)
    return EngineDied(failed.message, in_first_step=failed.in_first_step)


def _overload_of(failed: Failed) -> PlatformError:
    """Return the error of an overloaded engine.

    The scheduler's rejection has a reason. Without one the engine is still loading its model.
    """
    if failed.reason is None:
        return Unavailable(failed.message, code="overloaded", retry_after_s=1)
    return Overloaded(failed.message, failed.reason, retry_after_s=failed.retry_after_s)
