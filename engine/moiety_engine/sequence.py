"""State of one request in the engine core: its tokens, its KV blocks and how many tokens have computed KV.

A Sequence is mutable and has one owner, the scheduler. `tokens` holds the prompt and the output; the KV cache holds the
first `kv.num_computed` tokens. A decoding sequence lacks the KV of exactly its newest token.

While a step runs, the token that it samples is *pending*: `tokens` ends with PENDING, which counts as a token. The
value exists only on the device, in row `pending_row` of the step's sampled tokens.

What a scheduling policy knows of a sequence is not here: each policy keeps its own records.
"""

from __future__ import annotations

from enum import IntEnum

from moiety_engine.messages import CoreSubmit
from moiety_engine.sequence_records import (
    NO_DRAFTS,
    NOT_PADDED,
    BlockHashes,
    ExpertUse,
    KvState,
    RequestFacts,
    Timeline,
    TokenDeadlines,
)
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_engine.thought_scan import ThoughtScan

_NEVER_S = float("inf")
PENDING = -1  # placeholder of the token that the running step samples


class SequenceState(IntEnum):
    """State of a sequence in the scheduler."""

    WAITING = 0  # never started
    RUNNING = 1  # in the batch
    PAUSED = 2  # without credit
    RETURNING = 3  # was in the batch and will be again: preempted, or given new credit
    FINISHING = 4  # its last step runs, and it needs nothing beyond that step's result
    ENDED = 5


class Sequence:
    """State of one request: its tokens and its credit, and records of everything else."""

    __slots__ = (
        "_thought_scan",
        "block_hashes",
        "credit_last",
        "credit_tokens",
        "deadlines",
        "drafts",
        "entry",
        "experts",
        "kv",
        "padded_row",
        "pending_row",
        "predicted_output",
        "request",
        "service",
        "state",
        "timeline",
        "tokens",
    )

    def __init__(
        self,
        submit: CoreSubmit,
        *,
        order: int,
        seed: int,
        queued_unix_ns: int = 0,
        received_unix_ns: int | None = None,
        answer_apart: bool = False,
        grammar: GrammarHandle | None = None,
    ) -> None:
        """Create a waiting sequence.

        `received_unix_ns` is given if it had to wait before it was queued. With `answer_apart`, the block hashes of its
        output differ from those of a prompt with the same tokens.
        """
        self.request = RequestFacts.of(
            submit,
            order=order,
            seed=seed,
            queued_unix_ns=queued_unix_ns,
            received_unix_ns=queued_unix_ns if received_unix_ns is None else received_unix_ns,
            grammar=grammar,
        )
        self.service = submit.service  # service class that it is served in
        self.state = SequenceState.WAITING
        self.tokens = [*submit.prompt_ids, *(submit.resumed_ids or ())]
        self._thought_scan = None if submit.thought_budget is None else ThoughtScan(submit.thought_budget)
        self.pending_row = -1  # row of the pending token in the running step's samples; -1 if none is pending
        self.credit_tokens = submit.credit_tokens
        self.credit_last = False
        self.kv = KvState(num_uncached=len(self.tokens))
        self.block_hashes = BlockHashes(submit, self.tokens, answer_apart)
        self.deadlines = TokenDeadlines()
        self.timeline = Timeline()
        self.drafts = NO_DRAFTS
        self.experts = ExpertUse()
        self.padded_row = NOT_PADDED
        self.predicted_output = 0.0  # tokens; set by the policy: a prediction, never the truth
        self.entry = 0  # incremented on entering or leaving a policy's queue; older entries are void; odd while queued

    @property
    def key(self) -> int:
        return self.request.submit.key

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.request.num_prompt

    @property
    def remaining_output(self) -> float:
        """Return the predicted number of tokens that are still to be generated, at least 1."""
        remaining = self.predicted_output - len(self.tokens) + self.request.num_prompt
        return remaining if remaining > 1.0 else 1.0

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.kv.num_computed

    @property
    def num_reusable(self) -> int:
        """Number of first tokens that prefix hits may be a part of, without the last one, which must be computed.

        With log-probabilities of the prompt these end before the first token that has them.
        """
        sampling = self.request.submit.sampling
        if sampling.num_prompt_logprobs is None:
            return len(self.tokens)
        return min(len(self.tokens), sampling.prompt_logprobs_from)

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
        return self.tokens[self.request.num_prompt : self.num_known]

    def recent_output(self, count: int) -> list[int]:
        """Return the newest output tokens, at most `count`, with PENDING for one that is not known yet."""
        return self.tokens[max(self.request.num_prompt, len(self.tokens) - count) :]

    @property
    def thought_scan(self) -> ThoughtScan | None:
        """Scan of the output before its newest token, for the thought budget; None without one."""
        return self.thought_scan_before(len(self.tokens))

    def thought_scan_before(self, num_tokens: int) -> ThoughtScan | None:
        """Return the scan of the output before the last of `num_tokens` tokens; the number never decreases."""
        scan = self._thought_scan
        if scan is not None:
            scan.advance(self.tokens, self.request.num_prompt, max(num_tokens - 1, self.request.num_prompt))
        return scan

    @property
    def has_credit(self) -> bool:
        """True if its credit allows another token; always true for an embedding, which generates nothing."""
        return self.num_output < self.credit_tokens or self.request.submit.embed

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

    def define_deadlines(self) -> None:
        """Set the deadlines that its service class defines."""
        self.deadlines.define(self.request, self.service, self.kv.num_uncached)

    def expect_token(self, row: int) -> None:
        """Append a pending token, which the running step samples in this row."""
        self.tokens.append(PENDING)
        self.pending_row = row
        deadlines = self.deadlines
        if deadlines.due_s != _NEVER_S:
            pace = self.service.tpot_s
            deadlines.next_due_s = _NEVER_S if pace is None else deadlines.due_s + pace

    def fill_token(self, token_id: int, now_s: float) -> None:
        """Fill in the pending token: check whether it was on time, and set the next deadline."""
        self.tokens[-1] = token_id
        self.pending_row = -1
        deadlines = self.deadlines
        deadlines.last_token_s = now_s
        if now_s > deadlines.due_s:
            deadlines.on_time = False
            deadlines.next_due_s = _NEVER_S
        deadlines.due_s = deadlines.next_due_s

    def forgo_token(self) -> None:
        """Remove a pending token that is not needed."""
        if self.pending_row >= 0:
            self.tokens.pop()
            self.pending_row = -1
