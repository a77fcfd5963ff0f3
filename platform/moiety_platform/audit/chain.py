"""The chain: each entry's hash covers the entry and the hash before it, so nothing in the middle can be changed, left
out or put in unnoticed. Pure, and the same for whoever writes and whoever verifies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

GENESIS = "0" * 64
FIELDS = ("seq", "at", "actor", "action", "object_kind", "object_id", "before", "after")
OPTIONAL_FIELDS = ("actor_role",)  # hashed where they are not null, so that entries from before them still verify


class BrokenChain(Exception):
    """The message says where."""


def entry_hash(previous: str, entry: Mapping[str, Any]) -> str:
    """SHA-256 of the previous hash and the entry's fields as canonical JSON (sorted keys, no spaces, UTF-8)."""
    content = {name: entry[name] for name in FIELDS}
    content |= {name: entry[name] for name in OPTIONAL_FIELDS if entry.get(name) is not None}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def verify(entries: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """Go through all entries from the first; how many there are, and the last one's hash. Raises BrokenChain."""
    previous, seq = GENESIS, 0
    for entry in entries:
        if entry["seq"] != seq + 1:
            raise BrokenChain(f"after entry {seq} comes {entry['seq']}: something is missing")
        if entry["hash"] != entry_hash(previous, entry):
            raise BrokenChain(f"entry {entry['seq']} is not what it was when it was written, or one before it is not")
        previous, seq = entry["hash"], entry["seq"]
    return seq, previous
