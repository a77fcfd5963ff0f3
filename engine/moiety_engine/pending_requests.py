"""Requests that wait before they enter the scheduler's queue.

The order of the waits is: KV from another engine, the decoded images, a slot for the adapter, the compiled grammar, the
prompt's KV on disk. No other request waits because of them, and each wait ends by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from moiety_engine.images.pending_images import PendingImages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moiety_engine.adapters.adapter_slots import AdapterSlots
    from moiety_engine.disk.tier import DiskTier
    from moiety_engine.images.prompt_images import PromptImage
    from moiety_engine.kv_transfer.kv_receiver import KvReceiver
    from moiety_engine.messages import CoreFailure, CoreSubmit
    from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
    from moiety_engine.structured_outputs.stepping import GrammarHandle


class _PendingStage(Protocol):
    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a pending request and return it; None if this stage does not hold it."""


@dataclass(slots=True)
class _Wait:
    """Arrival and credit of a pending request, kept while it moves from stage to stage."""

    received_ns: int
    credit_tokens: int
    is_last: bool = False  # the credit is final


class ReadyRequest(NamedTuple):
    """A request whose waits are over, with its current credit."""

    submit: CoreSubmit
    grammar: GrammarHandle | None
    is_last: bool  # the credit is final
    received_ns: int  # when its first wait began


class PendingRequests:
    """Pending requests of one replica. Used by the step loop's thread.

    A request is in one stage at a time. Its credit is kept here, whichever stage that is.
    """

    def __init__(
        self,
        kv_receiver: KvReceiver | None,
        adapters: AdapterSlots,
        compile_queue: GrammarCompileQueue,
        disk: DiskTier | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._kv_receiver, self._adapters, self._compile_queue, self._disk = kv_receiver, adapters, compile_queue, disk
        self._images = PendingImages()
        stages = (kv_receiver, self._images, adapters, compile_queue, disk)
        self._stages: list[_PendingStage] = [stage for stage in stages if stage is not None]
        self.waits: dict[int, _Wait] = {}  # of all pending requests, by key; the loop asks it in each step
        self._clock_ns = clock_ns

    @property
    def is_empty(self) -> bool:
        return not self.waits

    @property
    def num_waiting_for_images(self) -> int:
        return self._images.num_waiting

    def must_wait(self, submit: CoreSubmit) -> bool:
        """Hold a request that has something to wait for. Return whether it waits."""
        self.waits[submit.key] = _Wait(self._clock_ns(), submit.credit_tokens)
        if submit.transfer_id and self._kv_receiver is not None:
            self._kv_receiver.add_request(submit)
            return True
        waits = self._waits_for_images(submit) or self._waits_in_memory(submit) or self._waits_for_disk(submit, None)
        if not waits:
            del self.waits[submit.key]
        return waits

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool:
        """Raise a pending request's credit. Return False if no request with this key is pending."""
        wait = self.waits.get(key)
        if wait is None:
            return False
        wait.credit_tokens = max(wait.credit_tokens, credit_tokens)
        wait.is_last = wait.is_last or last
        return True

    def add_images(self, key: int, images: tuple[PromptImage, ...]) -> None:
        """Give a pending request its decoded images, in whichever stage it is."""
        if key in self.waits:
            self._images.add_images(key, images)

    def remove_request(self, key: int) -> CoreSubmit | None:
        """Remove a pending request and return it; None if no request with this key is pending."""
        pending = next((found for stage in self._stages if (found := stage.remove_request(key)) is not None), None)
        if pending is not None:
            self._images.forget_images(key)
            del self.waits[key]
        return pending

    def take_ready(self) -> Iterator[ReadyRequest]:
        """Yield the requests whose wait is over."""
        if self._kv_receiver is not None:
            self._kv_receiver.drop_long_held(self._images.waiting_keys)
        for submit in () if self._kv_receiver is None else self._kv_receiver.take_ready():
            if not (self._waits_for_images(submit) or self._waits_in_memory(submit)):
                yield self._ready(submit, None)
        for submit in self._images.take_ready():
            if not (self._waits_in_memory(submit) or self._waits_for_disk(submit, None)):
                yield self._ready(submit, None)
        for submit in self._adapters.take_ready():
            if not (self._waits_for_grammar(submit) or self._waits_for_disk(submit, None)):
                yield self._ready(submit, None)
        for submit, grammar in self._compile_queue.take_ready():
            if not self._waits_for_disk(submit, grammar):
                yield self._ready(submit, grammar)
        for submit, restored_grammar in () if self._disk is None else self._disk.take_ready():
            yield self._ready(submit, restored_grammar)

    def take_refused(self) -> list[CoreFailure]:
        """Return the failures of the requests that cannot be served."""
        refused = self._adapters.take_refused() + self._compile_queue.take_refused()
        for one in refused:
            del self.waits[one.key]
        return refused

    def _waits_for_images(self, submit: CoreSubmit) -> bool:
        if submit.images_pending:
            self._images.add_request(submit)
        return submit.images_pending

    def _waits_in_memory(self, submit: CoreSubmit) -> bool:
        """Return whether the request waits for its adapter or its grammar."""
        return self._waits_for_adapter(submit) or self._waits_for_grammar(submit)

    def _waits_for_adapter(self, submit: CoreSubmit) -> bool:
        if submit.adapter:
            self._adapters.add_request(submit)
        return bool(submit.adapter)

    def _waits_for_grammar(self, submit: CoreSubmit) -> bool:
        if submit.grammar is not None:
            self._compile_queue.add_request(submit)
        return submit.grammar is not None

    def _waits_for_disk(self, submit: CoreSubmit, grammar: GrammarHandle | None) -> bool:
        return self._disk is not None and self._disk.must_wait(submit, grammar)

    def _ready(self, submit: CoreSubmit, grammar: GrammarHandle | None) -> ReadyRequest:
        wait = self.waits.pop(submit.key)
        submit = msgspec.structs.replace(submit, credit_tokens=wait.credit_tokens)
        return ReadyRequest(submit, grammar, wait.is_last, wait.received_ns)
