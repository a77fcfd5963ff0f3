"""Prefix affinity of engines, so that prompts with the same prefix share one prefix cache. Pure.

Rendezvous hashing (Thaler, Ravishankar: Using name-based mappings to increase hit rates, 1998): each engine has a
weight for a prefix, and the prefix belongs to the engine with the largest weight. A new engine takes only the prefixes
for which it now has the largest weight; a removed engine gives away only its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

BLOCK_TOKENS = 16
DEPTHS_BLOCKS = (1, 4, 16)  # shallow prefixes, which many prompts share, come first


def prefix_keys(cache_salt: bytes, prompt_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return a key for each depth that the prompt fills, the shallowest first; none for a prompt below one block.

    The salt is the tenant's, so another tenant's same prompt has other keys.
    """
    keys: list[bytes] = []
    salt = b""
    for num_blocks in DEPTHS_BLOCKS:
        num_tokens = num_blocks * BLOCK_TOKENS
        if len(prompt_ids) < num_tokens:
            break
        tokens = array("Q", prompt_ids[:num_tokens]).tobytes()
        salt = salt or blake2b(cache_salt, digest_size=32).digest()
        keys.append(blake2b(tokens, digest_size=16, key=salt).digest())
    return tuple(keys)


class Prefix:
    """Keys of one prompt, computed on demand: a model with one engine needs none."""

    __slots__ = ("_cache_salt", "_prompt_ids")

    def __init__(self, cache_salt: bytes, prompt_ids: Sequence[int]) -> None:
        self._cache_salt, self._prompt_ids = cache_salt, prompt_ids

    def __iter__(self) -> Iterator[bytes]:
        return iter(prefix_keys(self._cache_salt, self._prompt_ids))


def weight(prefix_key: bytes, address: str) -> int:
    """Return the engine's weight for the prefix, from its address, which survives restarts."""
    return int.from_bytes(blake2b(address.encode(), digest_size=8, key=prefix_key).digest())
