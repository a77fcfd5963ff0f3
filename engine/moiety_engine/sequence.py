"""State of one request in the engine core: its tokens, its KV blocks and how many tokens have computed KV.

A Sequence is mutable and has one owner, the scheduler. `tokens` holds the prompt and the output; the KV cache holds the
first `num_computed` tokens. A decoding sequence lacks the KV of exactly its newest token.

While a step runs, the token that it samples is *pending*: `tokens` ends with PENDING, which counts as a token. The
value exists only on the device, in row `pending_row` of the step's sampled tokens.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

from moiety_engine.cache.prefix import MARK_BYTES, block_hash, root_hash
from moiety_engine.messages import CoreEvent, CoreSubmit
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_wire.notes import EventKind, Reason

PENDING = -1  # placeholder of the token that the running step samples
MAX_EVENTS = 64
MAX_TRUSTED_DELAY_NS = 10**9  # upper bound on the delivery delay that a gateway's clock may claim


class SequenceState(IntEnum):
    """State of a sequence in the scheduler."""

    WAITING = 0  # never started
    RUNNING = 1  # in the batch
    PARKED = 2  # without credit
    RETURNING = 3  # was in the batch and will be again: preempted, or given new credit
    FINISHING = 4  # its last step runs, and it needs nothing beyond that step's result
    ENDED = 5


class Sequence:
    """State of one request. Times are unix nanoseconds, 0 until reached; deadlines are unix seconds."""

    __slots__ = (
        "_answer_apart",
        "_hashes",
        "_root",
        "arrival_s",
        "blocks",
        "completion_deadline_s",
        "credit_last",
        "credit_tokens",
        "delay",
        "due_s",
        "entry",
        "events",
        "finished_unix_ns",
        "first_deadline_s",
        "first_token_unix_ns",
        "group",
        "guide",
        "history",
        "host_blocks",
        "last_token_s",
        "next_due_s",
        "num_accepted",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_landed",
        "num_landing",
        "num_overtaken",
        "num_padded",
        "num_pauses",
        "num_preemptions",
        "num_prompt",
        "num_recomputed",
        "num_reserved",
        "num_resumed",
        "num_sealed",
        "num_speculative",
        "num_uncached",
        "on_time",
        "order",
        "padding_row",
        "peak_computed",
        "pending_row",
        "place",
        "predicted_output",
        "queued_unix_ns",
        "scheduled_unix_ns",
        "seed",
        "service",
        "submit",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        submit: CoreSubmit,
        *,
        order: int,
        seed: int,
        queued_unix_ns: int = 0,
        answer_apart: bool = False,
        guide: GrammarHandle | None = None,
    ) -> None:
        """Create a waiting sequence.

        With `answer_apart`, the block hashes of its output differ from those of a prompt with the same tokens.
        """
        self.submit = submit
        self.guide = guide  # grammar state of its output; derived from `tokens` alone
        self.order = order  # place in the queue, kept through preemption
        self.seed = seed
        self.queued_unix_ns = queued_unix_ns  # by this process's clock; the gateway's may differ
        trusted_ns = max(submit.arrival_unix_ns, queued_unix_ns - MAX_TRUSTED_DELAY_NS)
        self.arrival_s = min(queued_unix_ns, trusted_ns) / 1e9  # start of its deadlines
        self.service = submit.service  # service class that it is served in
        self.tenant = submit.tenant_id
        self.tokens = [*submit.prompt_ids, *(submit.resumed_ids or ())]
        self.num_prompt = len(submit.prompt_ids)
        self.num_resumed = len(self.tokens) - self.num_prompt  # output tokens that another engine generated before
        self.num_computed = 0
        self.num_uncached = len(self.tokens)  # tokens to prefill that no cache held on arrival
        # Prompt tokens that were prefix-cache hits when it was first scheduled, and those that speculative prefill
        # computed.
        self.num_cached = self.num_speculative = 0
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []  # while swapped out: they hold the first `num_computed` tokens
        self.num_sealed = 0  # blocks whose hash the pool knows
        self.credit_tokens = submit.credit_tokens
        self.credit_last = False
        # Number of preemptions, and of times it gave back a batch slot beyond its tenant's share.
        self.num_preemptions = self.num_pauses = 0
        self.num_overtaken = 0  # other sequences that joined since it first lacked blocks at the head of the queue
        # Tokens whose KV arrived from another engine and needs blocks, and tokens whose transferred KV is in blocks.
        self.num_landing = self.num_landed = 0
        self.num_recomputed = 0  # tokens whose KV was computed more than once
        self.peak_computed = 0  # largest number of tokens that had computed KV at any time
        self.num_drafted = self.num_accepted = 0  # draft tokens that were verified, and those that were accepted
        self.history: Any = None  # its draft history; set by a scheduler that speculates
        self.pending_row = -1  # row of the pending token in the running step's samples; -1 if none is pending
        self.place, self.group = (
            SequenceState.WAITING,
            0,
        )  # rank group that holds its blocks; may change while it has none
        self.entry = 0  # incremented on entering or leaving a policy's queue; older entries are void; odd while queued
        self.delay: Reason | None = None  # why it last could not start
        self.events: list[CoreEvent] = []
        self.first_deadline_s = self.completion_deadline_s = math.inf
        self.due_s = math.inf  # deadline of the next output token, while all earlier tokens were on time
        self.next_due_s = math.inf  # deadline of the token after the pending one, if one is pending
        self.last_token_s = 0.0  # unix time of its newest token
        self.on_time = True  # no deadline has been missed yet
        self.predicted_output = 0.0  # tokens; a prediction, never the truth
        self.scheduled_unix_ns = self.first_token_unix_ns = self.finished_unix_ns = 0
        # Padded batching only: the length to which its batch pads prompts, the positions it reserves, and whether the
        # sequence has finished while its row is still computed because the batch has not.
        self.num_padded = self.num_reserved = 0
        self.padding_row = False
        self._answer_apart = answer_apart
        self._root = root_hash(submit.tenant_id, submit.cache_salt, submit.adapter)
        self._hashes: list[bytes] = []

    @property
    def key(self) -> int:
        return self.submit.key

    @property
    def mark(self) -> bytes:
        """Mark of its tenant: the prefix of its block hashes."""
        return self._root[:MARK_BYTES]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def holds_blocks(self) -> bool:
        """True if it has blocks on the device or, when swapped out, on the host."""
        return bool(self.blocks or self.host_blocks)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def pending(self) -> bool:
        """True if its newest token is not known yet."""
        return self.pending_row >= 0

    @property
    def num_known(self) -> int:
        """Number of known tokens: all but a pending one."""
        return len(self.tokens) - (self.pending_row >= 0)

    @property
    def known_output(self) -> list[int]:
        """Output tokens without a pending one."""
        return self.tokens[self.num_prompt : self.num_known]

    @property
    def has_credit(self) -> bool:
        """True if its credit allows another token; always true for an embedding, which generates nothing."""
        return self.num_output < self.credit_tokens or self.submit.embed

    @property
    def decoding(self) -> bool:
        return self.num_output > 0 and self.num_uncomputed == 1

    def enter_queue(self) -> int:
        """Replace its entry in a policy's queue. Return 1 if it was not queued before, 0 if it was."""
        was_queued = self.entry & 1
        self.entry += 2 if was_queued else 1
        return 1 - was_queued

    def leave_queue(self) -> int:
        """Void its entry in a policy's queue. Return 1 if it was queued, 0 if not."""
        was_queued = self.entry & 1
        self.entry += was_queued
        return was_queued

    def set_deadlines(self) -> None:
        """Set the deadlines that its service class defines."""
        service = self.service
        if service.ttft_s is not None:
            per_token_s = service.ttft_per_1k_s / 1000
            num_allowed = self.num_uncached + self.submit.sibling_tokens
            self.first_deadline_s = self.arrival_s + service.ttft_s + per_token_s * num_allowed
        else:
            self.first_deadline_s = math.inf
        self.due_s = self.next_due_s = self.first_deadline_s
        if self.submit.deadline_unix_ns is not None:
            self.completion_deadline_s = self.submit.deadline_unix_ns / 1e9
        elif service.completion_s is not None:
            self.completion_deadline_s = self.arrival_s + service.completion_s
        else:
            self.completion_deadline_s = math.inf

    def go_on(self, now_s: float) -> None:
        """Take over the first token from another engine: check whether it was on time, and set the next deadline."""
        pace = self.service.tpot_s
        self.last_token_s = now_s
        self.on_time = now_s <= self.due_s
        self.due_s = self.next_due_s = math.inf if pace is None or not self.on_time else self.due_s + pace

    def expect_token(self, row: int) -> None:
        """Append a pending token, which the running step samples in this row."""
        self.tokens.append(PENDING)
        self.pending_row = row
        if self.due_s != math.inf:
            pace = self.service.tpot_s
            self.next_due_s = math.inf if pace is None else self.due_s + pace

    def token_came(self, token_id: int, now_s: float) -> None:
        """Fill in the pending token: check whether it was on time, and set the next deadline."""
        self.tokens[-1] = token_id
        self.pending_row = -1
        self.last_token_s = now_s
        if now_s > self.due_s:
            self.on_time = False
            self.next_due_s = math.inf
        self.due_s = self.next_due_s

    def forgo_token(self) -> None:
        """Remove a pending token that is not needed."""
        if self.pending_row >= 0:
            self.tokens.pop()
            self.pending_row = -1

    def note(self, unix_ns: int, kind: EventKind, reason: Reason, other: int = 0) -> None:
        """Record a scheduling decision about this request.

        At most MAX_EVENTS are kept: the first ones and the newest.
        """
        if len(self.events) == MAX_EVENTS:
            del self.events[MAX_EVENTS // 2]
        self.events.append(CoreEvent(unix_ns, kind, reason, other))

    def hash_at(self, index: int, block_size: int) -> bytes:
        """Return the hash of full block `index`; its tokens must be known."""
        if len(self._hashes) <= index:
            self._extend_hashes(index + 1, block_size)
        return self._hashes[index]

    def hashes_between(self, begin: int, end: int, block_size: int) -> list[bytes]:
        """Return the hashes of full blocks `begin` to `end` - 1; their tokens must be known."""
        if len(self._hashes) < end:
            self._extend_hashes(end, block_size)
        return self._hashes[begin:end]

    def _extend_hashes(self, count: int, block_size: int) -> None:
        hashes, tokens = self._hashes, self.tokens
        parent = hashes[-1] if hashes else self._root
        for begin in range(len(hashes) * block_size, count * block_size, block_size):
            if self._answer_apart and begin <= self.num_prompt < begin + block_size:
                parent = block_hash(parent, [-1, self.num_prompt])  # no token is -1
            parent = block_hash(parent, tokens[begin : begin + block_size])
            hashes.append(parent)
