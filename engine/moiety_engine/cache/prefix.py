"""Hashes of full KV blocks, chained from a tenant's salt.

A block's hash covers the salt and every token up to the block's end, so equal hashes mean equal KV contents, and a
tenant with another salt can neither hit nor observe them. It begins with a mark of the tenant, so that all that a
tenant has left can be found and forgotten, whatever its salts and adapters were.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16  # of a hash, after the mark
MARK_BYTES = 8


def tenant_mark(tenant_id: str) -> bytes:
    """With what the hashes of a tenant's blocks begin. Two tenants whose marks are alike share nothing, but are
    forgotten together."""
    return blake2b(tenant_id.encode(), digest_size=MARK_BYTES, person=b"moiety-tenant").digest()


def root_hash(tenant_id: str, salt: bytes, adapter: str = "") -> bytes:
    """Where the chain of a tenant's salt starts, for the model as it is or with an adapter, which makes other keys and
    values of the same tokens."""
    root = blake2b(salt, digest_size=HASH_BYTES, person=b"moiety-root").digest()
    if adapter:
        root = blake2b(root + adapter.encode(), digest_size=HASH_BYTES, person=b"moiety-adapter").digest()
    return tenant_mark(tenant_id) + root


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block that follows `parent` (the hash before it, or the root)."""
    return parent[:MARK_BYTES] + blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()
