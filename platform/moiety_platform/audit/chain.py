"""The chain: each entry's hash covers the entry and the hash before it, so nothing in the middle can be changed, left
out or put in unnoticed. Pure, and the same for whoever writes and whoever verifies.

Who acted and what changed may have to be erased one day. So an entry's hash covers them by a digest only, salted, and
they stand beside it: without salt and content the digest tells nothing, and the chain holds. What was erased is listed
by an entry of its own, with a seal over what is left of each; blanks that no entry lists are tampering like any other.
Entries of version 1, from before there were digests, have their content hashed itself: once it is erased their hash is
taken as it is, held in place by the next entry's hash, and what is left of them is proven by the seal alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64
VERSION = 2  # of entries that are written now
FIELDS = ("seq", "at", "actor", "action", "object_kind", "object_id", "before", "after")
OPTIONAL_FIELDS = ("actor_role",)  # hashed where they are not null, so that entries from before them still verify
ERASABLE = ("actor", "before", "after")
LASTING = tuple(name for name in FIELDS if name not in ERASABLE)
ERASE, LOG = "erase", "audit_log"  # action and kind of the entries that list what was erased
SEALS = "sealed"  # where they list it: number → seal


class BrokenChain(Exception):
    """The message says where."""


@dataclass(frozen=True, slots=True)
class Verified:
    """How many entries there are, the last one's hash, and how many of them have been erased."""

    num_entries: int
    head: str
    num_erased: int = 0


def digest(salt: str, entry: Mapping[str, Any]) -> str:
    """SHA-256 of the salt and what may be erased of the entry."""
    return _sha256(f"{salt}\n{_json({name: entry[name] for name in ERASABLE})}")


def entry_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """SHA-256 of the previous hash and the entry's fields as canonical JSON (sorted keys, no spaces, UTF-8)."""
    if _version(entry) == 1:
        content = {name: entry[name] for name in FIELDS}
    else:
        content = {name: entry[name] for name in (*LASTING, "version", "digest")}
    content |= {name: entry[name] for name in OPTIONAL_FIELDS if entry.get(name) is not None}
    return _sha256(f"{previous}\n{_json(content)}")


def seal(entry: Mapping[str, Any]) -> str:
    """SHA-256 of what is left of an entry that is erased."""
    names = (*LASTING, *OPTIONAL_FIELDS, "actor", "version", "digest", "hash")
    return _sha256(_json({name: entry.get(name) for name in names}))


def is_intact(previous: str, entry: Mapping[str, Any]) -> bool:
    """Whether an entry with all its content is what it was when it was written, after that hash."""
    if _version(entry) != 1 and (entry["salt"] is None or digest(entry["salt"], entry) != entry["digest"]):
        return False
    return bool(entry["hash"] == entry_hash(previous, entry))


class Verifier:
    """Goes through all entries from the first, a few at a time."""

    def __init__(self) -> None:
        self.head, self.num_entries, self.num_erased = GENESIS, 0, 0  # of what was taken and held
        self._unlisted: dict[str, str] = {}  # what was erased and no entry has listed yet: number → seal

    def take(self, entry: Mapping[str, Any]) -> None:
        """The next entry. Raises BrokenChain."""
        seq = self.num_entries + 1
        if entry["seq"] != seq:
            raise BrokenChain(f"after entry {self.num_entries} comes {entry['seq']}: something is missing")
        is_erased = entry.get("erased_at") is not None
        if is_erased:
            is_good = _is_empty(entry) and (_version(entry) == 1 or entry["hash"] == entry_hash(self.head, entry))
            self._unlisted[str(seq)] = seal(entry)
        else:
            is_good = is_intact(self.head, entry)
        if not is_good:
            raise BrokenChain(f"entry {seq} is not what it was when it was written, or one before it is not")
        for number, expected in _listed(entry).items():
            if self._unlisted.pop(number, expected) != expected:
                raise BrokenChain(f"entry {number} is not what was left of it when it was erased")
        self.head, self.num_entries, self.num_erased = entry["hash"], seq, self.num_erased + is_erased

    def finish(self) -> Verified:
        """There are no more. Raises BrokenChain."""
        if self._unlisted:
            first = min(map(int, self._unlisted))
            raise BrokenChain(f"the content of entry {first} is gone, and no entry says that it was erased")
        return Verified(self.num_entries, self.head, self.num_erased)


def verify(entries: Iterable[Mapping[str, Any]]) -> Verified:
    """Go through all entries from the first. Raises BrokenChain."""
    verifier = Verifier()
    for entry in entries:
        verifier.take(entry)
    return verifier.finish()


def _listed(entry: Mapping[str, Any]) -> Mapping[str, str]:
    if (entry["action"], entry["object_kind"]) != (ERASE, LOG):
        return {}
    listed: Mapping[str, str] = (entry["after"] or {}).get(SEALS, {})
    return listed


def _is_empty(entry: Mapping[str, Any]) -> bool:
    return all(entry.get(name) is None for name in ("before", "after", "salt"))


def _version(entry: Mapping[str, Any]) -> int:
    return int(entry.get("version", 1))


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
