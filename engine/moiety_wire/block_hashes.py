"""Hashes of full KV blocks, chained from a tenant's salt.

A block's hash covers the salt and every token up to the block's end, so equal hashes mean equal KV contents, and a
tenant with another salt can neither hit nor observe them. The hash begins with the tenant's mark, so that all cached
blocks of a tenant can be found and deleted, whatever its salts and adapters were.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16  # length of a hash after the mark
MARK_BYTES = 8


def tenant_mark(tenant_id: str) -> bytes:
    """Return the prefix of the hashes of a tenant's blocks.

    Two tenants with equal marks share no blocks, but their blocks are deleted together.
    """
    return blake2b(tenant_id.encode(), digest_size=MARK_BYTES, person=b"moiety-tenant").digest()


def root_hash(tenant_id: str, salt: bytes, adapter: str = "") -> bytes:
    """Return the root of a salt's hash chain, for the base model or for an adapter.

    An adapter has its own root because it computes other keys and values for the same tokens.
    """
    root = blake2b(salt, digest_size=HASH_BYTES, person=b"moiety-root").digest()
    if adapter:
        root = blake2b(root + adapter.encode(), digest_size=HASH_BYTES, person=b"moiety-adapter").digest()
    return tenant_mark(tenant_id) + root


def image_key(root: bytes, digest: bytes) -> bytes:
    """Return the key of an image's encoding for the tenant and the salt of `root`.

    A tenant with another salt can neither hit nor observe it. It begins with the tenant's mark, as block hashes do.
    """
    return root[:MARK_BYTES] + blake2b(root + digest, digest_size=HASH_BYTES, person=b"moiety-image").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block that follows `parent`, the hash of the previous block or the root."""
    return parent[:MARK_BYTES] + blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()
