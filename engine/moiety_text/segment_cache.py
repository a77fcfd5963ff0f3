"""Cache of the token ids of texts between control tokens, so that a conversation's earlier turns are encoded once.

A tokenizer first takes its control tokens out of a text and encodes what lies between them separately. The token ids of
such a segment therefore depend only on its text and on whether it opens the prompt, and a prompt's ids are those of its
segments with the control tokens between them.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

import tokenizers

from moiety_text.tokenizer import Tokenizer

TENANT_PART = 8  # one tenant may fill at most this part of the cache, so that it cannot displace all others
ENTRY_BYTES = 400  # of an entry beside its text and its ids
ID_BYTES = 4

_WORD = re.compile(r"\w")

Scope = tuple[str, bytes]
"""Whose texts these are: a tenant's id, and what else separates its requests, such as a client's salt."""
NO_SCOPE: Scope = ("", b"")  # nothing is cached
Segment = tuple[int, bytes, bool, str]
"""A text: the number of its encoder, the rest of its scope, whether it opens the prompt, and the text itself."""


class _TenantEntries:
    """Entries of one tenant, the least recently used first, and their bytes."""

    __slots__ = ("ids", "num_bytes", "used_s")

    def __init__(self) -> None:
        self.ids: OrderedDict[Segment, array[int]] = OrderedDict()
        self.num_bytes = 0
        self.used_s = 0.0


class SegmentCache:
    """Token ids by tenant and segment, within `max_bytes`. Thread-safe.

    Requests of another scope get nothing from an entry, and cannot measure whether there is one. The tenants that sent
    nothing for longest lose their entries first, and all of them after `idle_s`.
    """

    def __init__(self, max_bytes: int, idle_s: float = 1800.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._monotonic = monotonic
        self._tenants: OrderedDict[str, _TenantEntries] = OrderedDict()
        self.num_bytes = 0
        self.num_hit_tokens = 0
        self.num_missed_tokens = 0

    @property
    def is_enabled(self) -> bool:
        """True if the cache can keep anything."""
        return self._max_bytes > 0

    def resize(self, max_bytes: int) -> None:
        """Change the bound. 0 disables the cache."""
        with self._lock:
            self._max_bytes = max_bytes
            self._evict()

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Remove the entries of deleted tenants. Never raises."""
        with self._lock:
            for tenant_id in tenant_ids:
                self._drop(tenant_id)

    def drop_idle(self) -> None:
        """Remove the entries of tenants that have sent nothing for `idle_s`."""
        since_s = self._monotonic() - self._idle_s
        with self._lock:
            while self._tenants:
                tenant_id, entries = next(iter(self._tenants.items()))
                if entries.used_s > since_s:
                    return
                self._drop(tenant_id)

    def find(self, tenant_id: str, segments: Sequence[Segment]) -> list[array[int] | None]:
        """Return the token ids of each segment, None where they are not cached."""
        with self._lock:
            entries = self._tenants.get(tenant_id)
            if entries is None:
                return [None] * len(segments)
            self._use(tenant_id, entries)
            known, found = entries.ids, list(map(entries.ids.get, segments))
            for segment, ids in zip(segments, found, strict=True):
                if ids is not None:
                    known.move_to_end(segment)
                    self.num_hit_tokens += len(ids)
            return found

    def store(self, tenant_id: str, encoded: Mapping[Segment, Sequence[int]]) -> None:
        """Store the token ids of segments that were not found."""
        with self._lock:
            most = self._max_bytes // TENANT_PART
            entries = self._tenants.get(tenant_id) or _TenantEntries()
            for segment, ids in encoded.items():
                self.num_missed_tokens += len(ids)
                if segment not in entries.ids and _size_of(segment, ids) <= most:
                    entries.ids[segment] = kept = array("I", ids)
                    self._count(entries, _size_of(segment, kept))
            while entries.num_bytes > most:
                self._drop_oldest(entries)
            if entries.ids:
                self._use(tenant_id, entries)
            self._evict()

    def _use(self, tenant_id: str, entries: _TenantEntries) -> None:
        self._tenants[tenant_id] = entries
        self._tenants.move_to_end(tenant_id)
        entries.used_s = self._monotonic()

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes:
            tenant_id, entries = next(iter(self._tenants.items()))
            if entries.num_bytes <= self.num_bytes - self._max_bytes:
                self._drop(tenant_id)
            else:
                self._drop_oldest(entries)

    def _drop(self, tenant_id: str) -> None:
        entries = self._tenants.pop(tenant_id, None)
        if entries is not None:
            self.num_bytes -= entries.num_bytes

    def _drop_oldest(self, entries: _TenantEntries) -> None:
        segment, ids = entries.ids.popitem(last=False)
        self._count(entries, -_size_of(segment, ids))

    def _count(self, entries: _TenantEntries, num_bytes: int) -> None:
        entries.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _size_of(segment: Segment, ids: Sequence[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(segment[-1]) + ID_BYTES * len(ids)


_encoder_numbers = itertools.count()


class SegmentEncoder:
    """Encoder of one model's prompts that takes the token ids of known segments from a cache. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, boundaries: Mapping[str, int], cache: SegmentCache) -> None:
        """Create the encoder. `boundaries` are the ids of control tokens at which prompts can be divided."""
        self._tokenizer = tokenizer
        self._ids = dict(boundaries)
        longest_first = sorted(boundaries, key=len, reverse=True)
        self._boundary = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._cache = cache
        self._number = next(_encoder_numbers)

    @property
    def is_enabled(self) -> bool:
        """True if the cache can keep anything."""
        return self._cache.is_enabled

    def encode(self, text: str, scope: Scope, *, max_tokens: int | None) -> list[int]:
        """Return the ids of a prompt, and cache those of its segments for prompts of the same scope.

        Raises the errors of `Tokenizer.encode`.
        """
        self._tokenizer.check_fits(text, max_tokens)
        pieces = self._boundary.split(text)  # segments, and the boundaries between them
        (tenant_id, rest), number = scope, self._number
        segments = [(number, rest, place == 0, segment) for place, segment in enumerate(pieces[::2])]
        boundary_ids = [self._ids[name] for name in pieces[1::2]]
        found: list[Sequence[int] | None] = [*self._cache.find(tenant_id, segments)]
        missing = [place for place, ids in enumerate(found) if ids is None and segments[place][-1]]
        if missing:
            first, last = missing[0], missing[-1]
            before = min(first, 1)  # the segment before it is not encoded again, only the boundary between the two
            token_ids = self._tokenizer.encode("".join(pieces[2 * first - before : 2 * last + 1]))
            encoded = self._divided(token_ids, boundary_ids[first - before : last])
            if encoded is None:
                return self._tokenizer.encode(text)
            found[first : last + 1] = encoded[before:]
            self._cache.store(tenant_id, {segments[place]: found[place] or () for place in missing})
        token_ids = list(found[0] or ())
        for boundary_id, ids in zip(boundary_ids, found[1:], strict=True):
            token_ids.append(boundary_id)
            if ids:
                token_ids.extend(ids)
        return token_ids

    def _divided(self, token_ids: list[int], boundary_ids: Sequence[int]) -> list[list[int]] | None:
        """Return the ids before, between and after the boundaries; None if others of `token_ids` are boundaries."""
        if any(token_ids.count(one) != boundary_ids.count(one) for one in self._ids.values()):
            return None  # the model has a boundary's text among its ordinary words
        divided, start = [], 0
        for boundary_id in boundary_ids:
            end = token_ids.index(boundary_id, start)
            divided.append(token_ids[start:end])
            start = end + 1
        return [*divided, token_ids[start:]]


def boundaries_in(tokenizer: Tokenizer, source: str, names: Sequence[str]) -> dict[str, int]:
    """Return the ids of the control tokens among `names` that a chat template's source contains.

    Left out are tokens that a tokenizer does not take out of a text before all else, or whose text can overlap with
    that of another added token.
    """
    added = {token.content: token for token in tokenizer.added_tokens.values() if token.content}
    ids = {token.content: token_id for token_id, token in tokenizer.added_tokens.items()}
    wanted = [name for name in names if name in source and name in added and _divides(added[name])]
    others = [token.content for token in added.values() if not token.normalized]
    return {name: ids[name] for name in wanted if not any(_covers(other, name) for other in others)}


def _divides(token: tokenizers.AddedToken) -> bool:
    """Return whether a tokenizer takes the token out of any text, and nothing else with it."""
    takes_more = token.normalized or token.lstrip or token.rstrip or token.single_word
    return not takes_more and not (_WORD.match(token.content[0]) or _WORD.match(token.content[-1]))


def _covers(other: str, name: str) -> bool:
    """Return whether an occurrence of `other` can contain the beginning of one of `name`."""
    if other == name or name[0] not in other:
        return False
    starts = range(1, len(other)) if not other.startswith(name) else range(len(other))
    return any(name.startswith(other[start:]) or other.startswith(name, start) for start in starts)
