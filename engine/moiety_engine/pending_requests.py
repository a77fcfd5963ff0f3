"""Requests that wait before they enter the scheduler's queue.

The order of the waits is: KV from another engine, a slot for the adapter, the compiled grammar, the prompt's KV on
disk. No other request waits because of them, and each wait ends by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.adapters.adapter_slots import AdapterRegistry
    from moiety_engine.disk.tier import DiskTier
    from moiety_engine.kv_transfer.kv_receiver import KvReceiver
    from moiety_engine.messages import CoreFailure, CoreSubmit
    from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
    from moiety_engine.structured_outputs.stepping import GrammarHandle


class _PendingStage(Protocol):
    def leave(self, key: int) -> CoreSubmit | None:
        """Remove a pending request and return it; None if this stage does not hold it."""


@dataclass(slots=True)
class _Credit:
    tokens: int
    is_last: bool = False  # the credit is final


class PendingRequests:
    """Pending requests of one replica. Used by the step loop's thread.

    A request is in one stage at a time. Its credit is kept here, whichever stage that is.
    """

    def __init__(
        self,
        arrivals: KvReceiver | None,
        adapters: AdapterRegistry,
        compile_queue: GrammarCompileQueue,
        disk: DiskTier | None = None,
    ) -> None:
        self._arrivals, self._adapters, self._compile_queue, self._disk = arrivals, adapters, compile_queue, disk
        stages = (arrivals, adapters, compile_queue, None if disk is None else disk.restorer)
        self._stages: list[_PendingStage] = [stage for stage in stages if stage is not None]
        self._credits: dict[int, _Credit] = {}  # of all pending requests, by key

    @property
    def is_empty(self) -> bool:
        return not self._credits

    def must_wait(self, submit: CoreSubmit) -> bool:
        """Hold a request that has something to wait for. Return whether it waits."""
        self._credits[submit.key] = _Credit(submit.credit_tokens)
        if submit.transfer_id and self._arrivals is not None:
            self._arrivals.enter(submit)
            return True
        waits = self._waits_for_adapter(submit) or self._waits_for_grammar(submit) or self._waits_for_disk(submit, None)
        if not waits:
            del self._credits[submit.key]
        return waits

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool:
        """Raise a pending request's credit. Return False if no request with this key is pending."""
        credit = self._credits.get(key)
        if credit is None:
            return False
        credit.tokens = max(credit.tokens, credit_tokens)
        credit.is_last = credit.is_last or last
        return True

    def leave(self, key: int) -> CoreSubmit | None:
        """Remove a pending request and return it; None if no request with this key is pending."""
        pending = next((pending for stage in self._stages if (pending := stage.leave(key)) is not None), None)
        if pending is not None:
            del self._credits[key]
        return pending

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarHandle | None, bool]]:
        """Yield the requests whose wait is over.

        Each item is (request with its current credit, grammar, whether the credit is final).
        """
        for submit in () if self._arrivals is None else self._arrivals.take_ready():
            if not (self._waits_for_adapter(submit) or self._waits_for_grammar(submit)):
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
            del self._credits[one.key]
        return refused

    def _waits_for_adapter(self, submit: CoreSubmit) -> bool:
        if submit.adapter:
            self._adapters.enter(submit)
        return bool(submit.adapter)

    def _waits_for_grammar(self, submit: CoreSubmit) -> bool:
        if submit.grammar is not None:
            self._compile_queue.enter(submit)
        return submit.grammar is not None

    def _waits_for_disk(self, submit: CoreSubmit, grammar: GrammarHandle | None) -> bool:
        return self._disk is not None and self._disk.must_wait(submit, grammar)

    def _ready(
        self, submit: CoreSubmit, grammar: GrammarHandle | None
    ) -> tuple[CoreSubmit, GrammarHandle | None, bool]:
        credit = self._credits.pop(submit.key)
        return msgspec.structs.replace(submit, credit_tokens=credit.tokens), grammar, credit.is_last
