"""Hashes of full KV blocks, chained from a tenant's salt.

A block's hash covers the salt and every token up to the block's end, so equal hashes mean equal KV contents, and a
tenant with another salt can neither hit nor observe them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(salt: bytes, adapter: str = "") -> bytes:
    """Where the chain of a salt starts, for the model as it is or with an adapter, which makes other keys and values
    of the same tokens."""
    root = blake2b(salt, digest_size=HASH_BYTES, person=b"moiety-root")
    if not adapter:
        return root.digest()
    return blake2b(root.digest() + adapter.encode(), digest_size=HASH_BYTES, person=b"moiety-adapter").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent` (the hash before it, or the root)."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()
