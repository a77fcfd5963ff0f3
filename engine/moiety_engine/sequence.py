"""One request inside the core: its tokens, its blocks and how far its KV is computed.

A Sequence is mutable and has one owner, the scheduler. `tokens` are prompt and output together; the KV cache holds the
first `num_computed` of them. A decoding sequence lacks exactly its newest token.
"""

from __future__ import annotations

from moiety_engine.cache.prefix import block_hash, root_hash
from moiety_engine.messages import CoreSubmit


class Sequence:
    """State of one request. Times are unix nanoseconds, 0 where not reached."""

    __slots__ = (
        "_hashes",
        "_root",
        "blocks",
        "credit_last",
        "credit_tokens",
        "finished_unix_ns",
        "first_token_unix_ns",
        "ghost",
        "num_cached",
        "num_computed",
        "num_padded",
        "num_preemptions",
        "num_prompt",
        "num_reserved",
        "num_sealed",
        "order",
        "queued_unix_ns",
        "scheduled_unix_ns",
        "seed",
        "submit",
        "tokens",
    )

    def __init__(self, submit: CoreSubmit, *, order: int, seed: int, queued_unix_ns: int = 0) -> None:
        self.submit = submit
        self.order = order  # place in the queue, kept through preemption
        self.seed = seed
        self.queued_unix_ns = queued_unix_ns  # by this process's clock; the gateway's may differ
        self.tokens = list(submit.prompt_ids)
        self.num_prompt = len(submit.prompt_ids)
        self.num_computed = 0
        self.num_cached = 0  # prompt tokens taken from the prefix cache when first scheduled
        self.blocks: list[int] = []
        self.num_sealed = 0  # blocks whose hash the pool knows
        self.credit_tokens = submit.credit_tokens
        self.credit_last = False
        self.num_preemptions = 0
        self.scheduled_unix_ns = 0
        self.first_token_unix_ns = 0
        self.finished_unix_ns = 0
        # The padded strategy only: the length that its batch pads prompts to, the positions it reserves, and whether
        # the sequence has ended but its row is still computed because the batch has not.
        self.num_padded = 0
        self.num_reserved = 0
        self.ghost = False
        self._root = root_hash(submit.cache_salt)
        self._hashes: list[bytes] = []

    @property
    def key(self) -> int:
        return self.submit.key

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def has_credit(self) -> bool:
        return self.num_output < self.credit_tokens

    @property
    def decoding(self) -> bool:
        return self.num_output > 0 and self.num_uncomputed == 1

    def hash_at(self, index: int, block_size: int) -> bytes:
        """The hash of full block `index`; its tokens must be known."""
        while len(self._hashes) <= index:
            done = len(self._hashes)
            parent = self._hashes[-1] if done else self._root
            self._hashes.append(block_hash(parent, self.tokens[done * block_size : (done + 1) * block_size]))
        return self._hashes[index]
