"""Seeds of several completions of one prompt, the same in gateway and engine."""

from __future__ import annotations

from hashlib import blake2b


def seed_of_choice(seed: int | None, choice: int) -> int | None:
    """Return the seed of the i-th completion of a prompt.

    It is the request's seed for the first, and a fixed function of the seed and the index for the others.
    """
    if seed is None or choice == 0:
        return seed
    digest = blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
