"""Where requests wait before they queue: for KV from another engine, then for an adapter in its slot, then for a guide,
then for what the disk has of their prompt. Nobody waits for them, and each of these waits ends by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.adapters.registry import AdapterRegistry
    from moiety_engine.disk.tier import DiskTier
    from moiety_engine.guiding.follower import Follower
    from moiety_engine.guiding.lobby import Lobby
    from moiety_engine.messages import CoreFailure, CoreSubmit
    from moiety_engine.transfer.arrivals import Arrivals


class _Room(Protocol):
    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool: ...

    def leave(self, key: int) -> CoreSubmit | None: ...


class Anteroom:
    """Of one replica; used by the step loop's thread. A request is in one of its rooms at a time."""

    def __init__(
        self, arrivals: Arrivals | None, adapters: AdapterRegistry, lobby: Lobby, disk: DiskTier | None = None
    ) -> None:
        self._arrivals, self._adapters, self._lobby, self._disk = arrivals, adapters, lobby, disk
        self._rooms: list[_Room] = [adapters, lobby]
        if arrivals is not None:
            self._rooms.insert(0, arrivals)
        if disk is not None:
            self._rooms.append(disk.restorer)
        self._last: set[int] = set()  # requests that wait, with no more credit to come

    @property
    def is_empty(self) -> bool:
        waits_for_kv = self._arrivals is not None and self._arrivals.num_waiting > 0
        waits_for_disk = self._disk is not None and self._disk.restorer.num_waiting > 0
        return self._lobby.is_empty and self._adapters.is_quiet and not waits_for_kv and not waits_for_disk

    def must_wait(self, submit: CoreSubmit) -> bool:
        """Whether a request has anything to wait for; then it waits here."""
        if submit.transfer_id and self._arrivals is not None:
            self._arrivals.enter(submit)
            return True
        return self._waits_for_adapter(submit) or self._waits_for_guide(submit) or self._waits_for_disk(submit, None)

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool:
        """False: nobody of that key waits."""
        return any(room.extend(key, credit_tokens, last=last) for room in self._rooms)

    def leave(self, key: int) -> CoreSubmit | None:
        """Who waits goes; None if nobody of that key does."""
        self._last.discard(key)
        return next((guest for room in self._rooms if (guest := room.leave(key)) is not None), None)

    def take_ready(self) -> Iterator[tuple[CoreSubmit, Follower | None, bool]]:
        """Who need not wait any more: with the credit that it has by now, its guide, and whether no more is to come."""
        if self._arrivals is not None and self._arrivals.num_waiting:
            for come in list(self._arrivals.take_ready()):
                self._note(come.submit.key, come.credit_last)
                if not (self._waits_for_adapter(come.submit) or self._waits_for_guide(come.submit)):
                    yield self._ready(come.submit, None)
        if not self._adapters.is_quiet:
            for submit, credit_last in self._adapters.take_ready():
                self._note(submit.key, credit_last)
                if not (self._waits_for_guide(submit) or self._waits_for_disk(submit, None)):
                    yield self._ready(submit, None)
        if not self._lobby.is_empty:
            for ready in self._lobby.take_ready():
                self._note(ready.submit.key, ready.credit_last)
                submit = msgspec.structs.replace(ready.submit, credit_tokens=ready.credit_tokens)
                if not self._waits_for_disk(submit, ready.follower):
                    yield self._ready(submit, ready.follower)
        if self._disk is not None and self._disk.restorer.num_waiting:
            for restored in self._disk.take_ready():
                self._note(restored.submit.key, restored.credit_last)
                yield self._ready(restored.submit, restored.guide)

    def take_refused(self) -> list[CoreFailure]:
        """Who cannot be served."""
        refused = self._adapters.take_refused() + self._lobby.take_refused()
        self._last.difference_update(one.key for one in refused)
        return refused

    def _waits_for_adapter(self, submit: CoreSubmit) -> bool:
        if submit.adapter:
            self._adapters.enter(submit)
        return bool(submit.adapter)

    def _waits_for_guide(self, submit: CoreSubmit) -> bool:
        if submit.guide is not None:
            self._lobby.enter(submit)
        return submit.guide is not None

    def _waits_for_disk(self, submit: CoreSubmit, guide: Follower | None) -> bool:
        return self._disk is not None and self._disk.must_wait(submit, guide)

    def _note(self, key: int, credit_last: bool) -> None:
        if credit_last:
            self._last.add(key)

    def _ready(self, submit: CoreSubmit, guide: Follower | None) -> tuple[CoreSubmit, Follower | None, bool]:
        is_last = submit.key in self._last
        self._last.discard(submit.key)
        return submit, guide, is_last
