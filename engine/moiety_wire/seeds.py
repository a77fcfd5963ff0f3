"""The seeds of several answers to one prompt, the same whoever asks for them."""

from __future__ import annotations

from hashlib import blake2b


def seed_of_choice(seed: int | None, choice: int) -> int | None:
    """The seed of the i-th answer to a prompt: the request's own for the first, a fixed function of both after it."""
    if seed is None or choice == 0:
        return seed
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
