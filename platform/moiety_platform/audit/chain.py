"""Hash chain of the audit log. Pure; the writer and the verifier share it.

The hash of each entry covers the entry and the previous hash, so nothing in the middle can be changed, left out or
inserted unnoticed.

Actor and content of an entry may have to be erased later. The hash therefore covers them only by a salted digest, and
they are stored beside it: without salt and content the digest reveals nothing, and the chain still holds. An entry of
its own lists what was erased, with a seal over the remains of each; blanks that no entry lists count as tampering. In
entries of version 1, which have no digest, the content itself is hashed: once it is erased, their hash is taken as
given, confirmed by the hash of the next entry, and only the seal proves their remains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64
VERSION = 2  # version of entries written now
FIELDS = ("seq", "at", "actor", "action", "object_kind", "object_id", "before", "after")
OPTIONAL_FIELDS = ("actor_role",)  # hashed where not null, so that entries from before these fields still verify
ERASABLE = ("actor", "before", "after")
LASTING = tuple(name for name in FIELDS if name not in ERASABLE)
ERASE, LOG = "erase", "audit_log"  # action and kind of the entries that list erased content
SEALS = "sealed"  # key of their list: number → seal


class BrokenChain(Exception):
    """The chain is broken. The message says where."""


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    """Number of entries, hash of the last entry, and number of erased entries."""

    num_entries: int
    head: str
    num_erased: int = 0


def digest(salt: str, entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the salt and the erasable fields of the entry."""
    return _sha256(f"{salt}\n{_json({name: entry[name] for name in ERASABLE})}")


def entry_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the previous hash and the entry's fields.

    The fields are canonical JSON (sorted keys, no spaces, UTF-8).
    """
    if _version(entry) == 1:
        content = {name: entry[name] for name in FIELDS}
    else:
        content = {name: entry[name] for name in (*LASTING, "version", "digest")}
    content |= {name: entry[name] for name in OPTIONAL_FIELDS if entry.get(name) is not None}
    return _sha256(f"{previous}\n{_json(content)}")


def seal(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the remains of an erased entry."""
    names = (*LASTING, *OPTIONAL_FIELDS, "actor", "version", "digest", "hash")
    return _sha256(_json({name: entry.get(name) for name in names}))


def is_intact(previous: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry with all its content is unchanged since it was written after the hash `previous`."""
    if _version(entry) != 1 and (entry["salt"] is None or digest(entry["salt"], entry) != entry["digest"]):
        return False
    return bool(entry["hash"] == entry_hash(previous, entry))


class Verifier:
    """Incremental verification of all entries from the first."""

    def __init__(self) -> None:
        self.head, self.num_entries, self.num_erased = GENESIS, 0, 0  # of the entries verified so far
        self._unlisted: dict[str, str] = {}  # erased entries that no entry has listed yet: number → seal

    def take(self, entry: Mapping[str, Any]) -> None:
        """Verify the next entry. Raises BrokenChain."""
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
            raise BrokenChain(f"entry {seq} or an earlier entry was modified after it was written")
        for number, expected in _listed(entry).items():
            if self._unlisted.pop(number, expected) != expected:
                raise BrokenChain(f"entry {number} was modified after its content was erased")
        self.head, self.num_entries, self.num_erased = entry["hash"], seq, self.num_erased + is_erased

    def finish(self) -> VerifiedChain:
        """Complete the verification after the last entry. Raises BrokenChain."""
        if self._unlisted:
            first = min(map(int, self._unlisted))
            raise BrokenChain(f"the content of entry {first} is missing, and no entry records its deletion")
        return VerifiedChain(self.num_entries, self.head, self.num_erased)


def verify(entries: Iterable[Mapping[str, Any]]) -> VerifiedChain:
    """Verify all entries from the first. Raises BrokenChain."""
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
