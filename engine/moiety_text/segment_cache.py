"""Cache of the token ids of texts between control tokens, so that a conversation's earlier turns are encoded once.

A tokenizer first takes its control tokens out of a text and encodes what lies between them separately. The token ids of
such a segment therefore depend only on its text and on whether it opens the prompt, and a prompt's ids are those of its
segments with the control tokens between them.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import tokenizers

from moiety_text.tokenizer import Tokenizer

SCOPE_PART = 8  # one salt may fill at most this part of the cache, so that it cannot displace all others
ENTRY_BYTES = 250  # of an entry beside its text and its ids
ID_BYTES = 4

Segment = tuple[bool, str]  # whether it opens the prompt, and its text
Scope = tuple[object, bytes]  # a model's encoder and the salt of its requests


class _ScopeEntries:
    """Entries of one scope, the least recently used first, and their bytes."""

    __slots__ = ("ids", "num_bytes")

    def __init__(self) -> None:
        self.ids: OrderedDict[Segment, array[int]] = OrderedDict()
        self.num_bytes = 0


class SegmentCache:
    """Token ids by scope and segment, within `max_bytes`. Thread-safe.

    Requests with another salt get nothing from an entry, and cannot measure whether there is one. The scopes that were
    not used for longest lose their entries first.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._scopes: OrderedDict[Scope, _ScopeEntries] = OrderedDict()
        self.num_bytes = 0
        self.num_hit_tokens = 0
        self.num_missed_tokens = 0

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    def resize(self, max_bytes: int) -> None:
        """Change the bound. 0 disables the cache."""
        with self._lock:
            self._max_bytes = max_bytes
            self._evict()

    def find(self, scope: Scope, segments: Sequence[Segment]) -> list[array[int] | None]:
        """Return the token ids of each segment, None where they are not cached."""
        with self._lock:
            entries = self._scopes.get(scope)
            if entries is None:
                return [None] * len(segments)
            self._scopes.move_to_end(scope)
            known, found = entries.ids, list(map(entries.ids.get, segments))
            for segment, ids in zip(segments, found, strict=True):
                if ids is not None:
                    known.move_to_end(segment)
                    self.num_hit_tokens += len(ids)
            return found

    def store(self, scope: Scope, encoded: Mapping[Segment, Sequence[int]]) -> None:
        """Store the token ids of segments that were not found."""
        with self._lock:
            most = self._max_bytes // SCOPE_PART
            entries = self._scopes.pop(scope, None) or _ScopeEntries()
            for segment, ids in encoded.items():
                self.num_missed_tokens += len(ids)
                if segment not in entries.ids and _size_of(segment, ids) <= most:
                    entries.ids[segment] = kept = array("I", ids)
                    self._count(entries, _size_of(segment, kept))
            while entries.num_bytes > most:
                self._drop_oldest(entries)
            if entries.ids:
                self._scopes[scope] = entries
            self._evict()

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes:
            scope, entries = next(iter(self._scopes.items()))
            self._drop_oldest(entries)
            if not entries.ids:
                del self._scopes[scope]

    def _drop_oldest(self, entries: _ScopeEntries) -> None:
        segment, ids = entries.ids.popitem(last=False)
        self._count(entries, -_size_of(segment, ids))

    def _count(self, entries: _ScopeEntries, num_bytes: int) -> None:
        entries.num_bytes += num_bytes
        self.num_bytes += num_bytes


def _size_of(segment: Segment, ids: Sequence[int]) -> int:
    return ENTRY_BYTES + sys.getsizeof(segment[1]) + ID_BYTES * len(ids)


class SegmentEncoder:
    """Encoder of one model's prompts that takes the token ids of known segments from a cache. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, boundaries: Mapping[str, int], cache: SegmentCache) -> None:
        """Create the encoder. `boundaries` are the ids of control tokens at which prompts can be divided."""
        self._tokenizer = tokenizer
        self._ids = dict(boundaries)
        longest_first = sorted(boundaries, key=len, reverse=True)
        self._boundary = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._cache = cache
        self._owner = object()

    @property
    def is_enabled(self) -> bool:
        """True if the cache can keep anything."""
        return self._cache.is_enabled

    def encode(self, text: str, salt: bytes, *, max_tokens: int | None) -> list[int]:
        """Return the ids of a prompt, and cache those of its segments for prompts with the same salt.

        Raises the errors of `Tokenizer.encode`.
        """
        self._tokenizer.check_fits(text, max_tokens)
        pieces = self._boundary.split(text)  # segments, and the boundaries between them
        segments = [(place == 0, segment) for place, segment in enumerate(pieces[::2])]
        scope, boundary_ids = (self._owner, salt), [self._ids[name] for name in pieces[1::2]]
        found: list[Sequence[int] | None] = [*self._cache.find(scope, segments)]
        missing = [place for place, ids in enumerate(found) if ids is None and segments[place][1]]
        if missing:
            first, last = missing[0], missing[-1]
            before = min(first, 1)  # the segment before it is not encoded again, only the boundary between the two
            token_ids = self._tokenizer.encode("".join(pieces[2 * first - before : 2 * last + 1]))
            encoded = self._divided(token_ids, boundary_ids[first - before : last])
            if encoded is None:
                return self._tokenizer.encode(text)
            found[first : last + 1] = encoded[before:]
            self._cache.store(scope, {segments[place]: found[place] or () for place in missing})
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
    return not takes_more and not (token.content[0].isalnum() or token.content[-1].isalnum())


def _covers(other: str, name: str) -> bool:
    """Return whether an occurrence of `other` can contain the beginning of one of `name`."""
    if other == name or name[0] not in other:
        return False
    starts = range(1, len(other)) if not other.startswith(name) else range(len(other))
    return any(name.startswith(other[start:]) or other.startswith(name, start) for start in starts)
