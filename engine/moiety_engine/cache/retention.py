"""Prefix-cache retention: blocks of conversations that are expected to continue are evicted last, until they expire.

At most half of a cache is retained. That half is divided among the tenants with retained blocks by their weights; a
tenant above its share loses its oldest retained blocks first. Retention is an order of eviction and no reservation: a
request gets the blocks that it needs, retained or not.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

_PART = 0.5  # fraction of a cache
_SWEEP_INTERVAL_S = 10.0

Key = TypeVar("Key", bytes, str)


class _RetainedPrefix(NamedTuple):
    size: int
    until_s: float


@dataclass(slots=True)
class _TenantRetention(Generic[Key]):
    weight: float
    size: int = 0
    prefixes: OrderedDict[Key, _RetainedPrefix] = field(default_factory=OrderedDict)  # retained longest first


class PrefixRetention(Generic[Key]):
    """Retention of one cache, whose size is in blocks or bytes. Used by one thread."""

    def __init__(
        self,
        size: int,
        *,
        end_retention: Callable[[Key], None] = lambda _key: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the retention. `end_retention` is called with each key whose retention ends."""
        self.most = int(size * _PART)
        self._on_release: Callable[[Key], None] = end_retention
        self._clock = clock
        self._accounts: dict[bytes | str, _TenantRetention[Key]] = {}
        self.owner_of: dict[Key, bytes | str] = {}  # of retained keys, some of which may have expired; callers read it
        self._swept_s = 0.0

    def __contains__(self, key: object) -> bool:
        owner = self.owner_of.get(key)  # type: ignore[call-overload]
        return owner is not None and self._accounts[owner].prefixes[key].until_s > self._clock()  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.owner_of)

    @property
    def size(self) -> int:
        return sum(account.size for account in self._accounts.values())

    def retain(self, owner: bytes | str, items: Iterable[tuple[Key, int]], keep_s: float, weight: float = 1.0) -> None:
        """Retain these (key, size) items for `keep_s` seconds, the most valuable last.

        An item that is already retained for longer stays so.
        """
        until_s = self._clock() + keep_s
        account = self._accounts.get(owner) or _TenantRetention(weight)
        account.weight = weight
        for key, size in items:
            before = self._forget(key)
            self._accounts[owner] = account  # `_forget` removed the account if it held nothing else
            account.prefixes[key] = _RetainedPrefix(size, until_s if before is None else max(until_s, before.until_s))
            account.size += size
            self.owner_of[key] = owner
        self._enforce_shares()

    def drop(self, key: Key) -> None:
        """End the retention of a key that is no longer cached."""
        if key in self.owner_of:
            self._forget(key)

    def forget(self) -> None:
        """Clear the retention: nothing is cached any longer."""
        self._accounts.clear()
        self.owner_of.clear()

    def sweep(self) -> None:
        """End the retention of expired keys; does nothing more often than every `_SWEEP_INTERVAL_S` seconds."""
        now_s = self._clock()
        if not self.owner_of or now_s - self._swept_s < _SWEEP_INTERVAL_S:
            return
        self._swept_s = now_s
        for account in list(self._accounts.values()):
            for key in [key for key, prefix in account.prefixes.items() if prefix.until_s <= now_s]:
                self._forget(key)
                self._on_release(key)

    def _enforce_shares(self) -> None:
        total = sum(account.weight for account in self._accounts.values())
        for account in list(self._accounts.values()):
            share = self.most * account.weight / total
            while account.size > share:
                key = next(iter(account.prefixes))
                self._forget(key)
                self._on_release(key)

    def _forget(self, key: Key) -> _RetainedPrefix | None:
        owner = self.owner_of.pop(key, None)
        if owner is None:
            return None
        account = self._accounts[owner]
        prefix = account.prefixes.pop(key)
        account.size -= prefix.size
        if not account.prefixes:
            del self._accounts[owner]
        return prefix
