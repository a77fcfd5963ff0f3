"""Where requests wait before they queue: for KV from another engine, then for an adapter in its slot, then for a guide,
then for what the disk has of their prompt. Nobody waits for them, and each of these waits ends by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.adapters.registry import AdapterRegistry
    from moiety_engine.disk.tier import DiskTier
    from moiety_engine.kv_transfer.kv_receiver import KvReceiver
    from moiety_engine.messages import CoreFailure, CoreSubmit
    from moiety_engine.structured_outputs.compile_queue import GrammarCompileQueue
    from moiety_engine.structured_outputs.stepping import GrammarHandle


class _PendingStage(Protocol):
    def leave(self, key: int) -> CoreSubmit | None:
        """A pending goes; None if there is no such pending."""


@dataclass(slots=True)
class _Credit:
    tokens: int
    is_last: bool = False  # no more is to come


class PendingRequests:
    """Of one replica; used by the step loop's thread. A request is in one of its rooms at a time, and gets its credit
    here, whichever that is."""

    def __init__(
        self,
        arrivals: KvReceiver | None,
        adapters: AdapterRegistry,
        compile_queue: GrammarCompileQueue,
        disk: DiskTier | None = None,
    ) -> None:
        self._arrivals, self._adapters, self._compile_queue, self._disk = arrivals, adapters, compile_queue, disk
        rooms = (arrivals, adapters, compile_queue, None if disk is None else disk.restorer)
        self._stages: list[_PendingStage] = [room for room in rooms if room is not None]
        self._credits: dict[int, _Credit] = {}  # of all who wait here, by their keys

    @property
    def is_empty(self) -> bool:
        return not self._credits

    def must_wait(self, submit: CoreSubmit) -> bool:
        """Whether a request has anything to wait for; then it waits here."""
        self._credits[submit.key] = _Credit(submit.credit_tokens)
        if submit.transfer_id and self._arrivals is not None:
            self._arrivals.enter(submit)
            return True
        waits = self._waits_for_adapter(submit) or self._waits_for_guide(submit) or self._waits_for_disk(submit, None)
        if not waits:
            del self._credits[submit.key]
        return waits

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool:
        """False: nobody of that key waits."""
        credit = self._credits.get(key)
        if credit is None:
            return False
        credit.tokens = max(credit.tokens, credit_tokens)
        credit.is_last = credit.is_last or last
        return True

    def leave(self, key: int) -> CoreSubmit | None:
        """Who waits goes; None if nobody of that key does."""
        pending = next((pending for room in self._stages if (pending := room.leave(key)) is not None), None)
        if pending is not None:
            del self._credits[key]
        return pending

    def take_ready(self) -> Iterator[tuple[CoreSubmit, GrammarHandle | None, bool]]:
        """Who need not wait any more: with the credit that it has by now, its guide, and whether no more is to come."""
        for submit in () if self._arrivals is None else self._arrivals.take_ready():
            if not (self._waits_for_adapter(submit) or self._waits_for_guide(submit)):
                yield self._ready(submit, None)
        for submit in self._adapters.take_ready():
            if not (self._waits_for_guide(submit) or self._waits_for_disk(submit, None)):
                yield self._ready(submit, None)
        for submit, guide in self._compile_queue.take_ready():
            if not self._waits_for_disk(submit, guide):
                yield self._ready(submit, guide)
        for submit, restored_guide in () if self._disk is None else self._disk.take_ready():
            yield self._ready(submit, restored_guide)

    def take_refused(self) -> list[CoreFailure]:
        """Who cannot be served."""
        refused = self._adapters.take_refused() + self._compile_queue.take_refused()
        for one in refused:
            del self._credits[one.key]
        return refused

    def _waits_for_adapter(self, submit: CoreSubmit) -> bool:
        if submit.adapter:
            self._adapters.enter(submit)
        return bool(submit.adapter)

    def _waits_for_guide(self, submit: CoreSubmit) -> bool:
        if submit.guide is not None:
            self._compile_queue.enter(submit)
        return submit.guide is not None

    def _waits_for_disk(self, submit: CoreSubmit, guide: GrammarHandle | None) -> bool:
        return self._disk is not None and self._disk.must_wait(submit, guide)

    def _ready(self, submit: CoreSubmit, guide: GrammarHandle | None) -> tuple[CoreSubmit, GrammarHandle | None, bool]:
        credit = self._credits.pop(submit.key)
        return msgspec.structs.replace(submit, credit_tokens=credit.tokens), guide, credit.is_last
