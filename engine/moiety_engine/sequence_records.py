"""Parts of a sequence: facts of its request, KV, deadlines, timeline, and counts of speculation.

Each record groups what changes together. The owner of all of them is the scheduler, as for the sequence itself. Very
many requests may wait, so records that cannot be part of a reference cycle are not tracked by the garbage collector,
and empty values are shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from moiety_engine.images.prompt_images import PromptImages
from moiety_engine.messages import CoreEvent, CoreSubmit
from moiety_engine.structured_outputs.stepping import GrammarHandle
from moiety_wire.block_hashes import block_hash, image_key, root_hash, tenant_mark
from moiety_wire.classes import ServiceClass
from moiety_wire.expert_profile import ExpertProfile
from moiety_wire.trace_events import EventKind, Reason

MAX_EVENTS = 64
NO_BLOCKS: tuple[int, ...] = ()
MAX_TRUSTED_DELAY_NS = 10**9  # upper bound on the delivery delay that a gateway's clock may claim


@dataclass(frozen=True, slots=True, eq=False)
class RequestFacts:
    """Facts of a request that are known at its arrival and never change."""

    submit: CoreSubmit
    tenant: str
    order: int  # place in the queue, kept through preemption
    seed: int
    queued_unix_ns: int  # by this process's clock; the gateway's may differ
    waited_s: float  # before it was queued, for its KV, images, adapter, grammar or disk blocks
    arrival_s: float  # start of its deadlines, in unix seconds
    num_prompt: int
    num_resumed: int  # output tokens that another engine generated before
    grammar: GrammarHandle | None  # grammar state of its output; derived from the tokens alone
    images: PromptImages | None = None
    is_greedy: bool = False  # each of its tokens is the largest unmodified logit's, and nothing else is wanted of a row

    @classmethod
    def of(
        cls,
        submit: CoreSubmit,
        *,
        order: int,
        seed: int,
        queued_unix_ns: int,
        received_unix_ns: int,
        grammar: GrammarHandle | None,
    ) -> RequestFacts:
        """Return the facts of a request that arrived at `received_unix_ns` and is queued at `queued_unix_ns`."""
        trusted_ns = max(submit.arrival_unix_ns, received_unix_ns - MAX_TRUSTED_DELAY_NS)
        return cls(
            submit=submit,
            tenant=submit.tenant_id,
            order=order,
            seed=seed,
            queued_unix_ns=queued_unix_ns,
            waited_s=(queued_unix_ns - received_unix_ns) / 1e9 if queued_unix_ns > received_unix_ns else 0.0,
            arrival_s=min(received_unix_ns, trusted_ns) / 1e9,
            num_prompt=len(submit.prompt_ids),
            num_resumed=len(submit.resumed_ids or ()),
            grammar=grammar,
            images=_images_of(submit),
            is_greedy=grammar is None and _is_greedy(submit),
        )


class BlockHashes(msgspec.Struct, eq=False, gc=False):
    """Hashes of a sequence's full blocks, each computed once. The chain starts from the tenant's salt.

    `tokens` is the sequence's own list, which grows. The hash of a block with tokens of an image covers the image's
    place and content too. With `answer_apart`, the hashes of the output differ from those of a prompt with the same
    tokens.
    """

    submit: CoreSubmit
    tokens: list[int]
    answer_apart: bool
    _hashes: list[bytes] = []

    @property
    def mark(self) -> bytes:
        """Mark of the tenant: the prefix of all of the hashes."""
        return tenant_mark(self.submit.tenant_id)

    def at(self, index: int, block_size: int) -> bytes:
        """Return the hash of full block `index`; its tokens must be known."""
        if len(self._hashes) <= index:
            self._extend(index + 1, block_size)
        return self._hashes[index]

    def between(self, begin: int, end: int, block_size: int) -> list[bytes]:
        """Return the hashes of full blocks `begin` to `end` - 1; their tokens must be known."""
        if len(self._hashes) < end:
            self._extend(end, block_size)
        return self._hashes[begin:end]

    def _extend(self, count: int, block_size: int) -> None:
        hashes, tokens, num_prompt = self._hashes, self.tokens, len(self.submit.prompt_ids)
        parent = hashes[-1] if hashes else _root_of(self.submit)
        for begin in range(len(hashes) * block_size, count * block_size, block_size):
            if self.answer_apart and begin <= num_prompt < begin + block_size:
                parent = block_hash(parent, [-1, num_prompt])  # no token is -1
            for image in self.submit.images:
                if image.start < begin + block_size and begin < image.end:
                    parent = block_hash(parent + image.digest, [-2, image.start])  # no token is -2
            parent = block_hash(parent, tokens[begin : begin + block_size])
            hashes.append(parent)


def _is_greedy(submit: CoreSubmit) -> bool:
    sampling = submit.sampling
    draws = sampling.temperature > 0 or sampling.num_logprobs is not None or sampling.token_rules is not None
    penalized = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    return not (draws or penalized or sampling.logit_bias or submit.min_tokens or submit.thought_budget is not None)


def _images_of(submit: CoreSubmit) -> PromptImages | None:
    if not submit.images:
        return None
    root = root_hash(submit.tenant_id, submit.cache_salt)
    return PromptImages(submit.images, [image_key(root, image.digest) for image in submit.images])


def _root_of(submit: CoreSubmit) -> bytes:
    return root_hash(submit.tenant_id, submit.cache_salt, submit.adapter)


class KvState(msgspec.Struct, eq=False, gc=False):
    """KV of one sequence: its blocks and how many of its tokens are computed. Counts are in tokens."""

    num_uncached: int  # tokens to prefill that no cache held on arrival; encoding images counts as tokens
    group: int = 0  # rank group that holds its blocks; may change while it has none
    blocks: list[int] = []  # of the first cache group, in the order of positions
    further_blocks: tuple[list[int], ...] = ()  # of the other cache groups, for the same positions
    firsts: tuple[int, ...] = (0,)  # first block that each cache group holds; those before it were freed
    state_slot: int = -1  # slot of the recurrent state, while swapped out one on the host; -1: none
    draft_slot: int = -1  # slot of the state before its draft, while that is verified; -1: none
    snapshot_ends: tuple[int, ...] = ()  # numbers of blocks after which prefill keeps a snapshot of the state
    host_blocks: Sequence[int] = NO_BLOCKS  # while swapped out: computed blocks, by cache group
    num_sealed: int = 0  # blocks of each cache group whose hash the pool was told
    num_computed: int = 0
    peak_computed: int = 0  # largest number of tokens that had computed KV at any time
    num_recomputed: int = 0  # tokens whose KV was computed more than once
    num_cached: int = 0  # prompt tokens that were prefix-cache hits when it was first scheduled
    num_speculative: int = 0  # of these, tokens that speculative prefill computed
    num_transferred_tokens: int = 0  # tokens whose KV arrived from another engine and needs blocks
    num_landed: int = 0  # tokens whose transferred KV is in blocks

    @property
    def tables(self) -> tuple[list[int], ...]:
        """Block table of each cache group. The entries of freed blocks are void."""
        return (self.blocks, *self.further_blocks)

    @property
    def num_held(self) -> int:
        """Number of device blocks over all cache groups."""
        if not self.blocks:
            return 0
        return len(self.blocks) * (1 + len(self.further_blocks)) - sum(self.firsts)

    def fill_tables(self, blocks: list[int], num_tables: int) -> None:
        """Give every cache group the same blocks, for a step whose values do not matter."""
        self.blocks, self.further_blocks = blocks, tuple(list(blocks) for _ in range(num_tables - 1))
        self.firsts = (0,) * num_tables

    @property
    def is_on_device(self) -> bool:
        """True if there are blocks or a recurrent state on the device."""
        return bool(self.blocks) or (self.state_slot >= 0 and not self.host_blocks)

    @property
    def holds_blocks(self) -> bool:
        """True if there are blocks or a recurrent state on the device or, when swapped out, on the host."""
        return bool(self.blocks or self.host_blocks) or self.state_slot >= 0


class TokenDeadlines(msgspec.Struct, eq=False, gc=False):
    """Deadlines of one sequence's tokens, in unix seconds; infinite without one."""

    first_s: float = math.inf  # of the first token
    completion_s: float = math.inf  # of the last token
    due_s: float = math.inf  # of the next output token, while all earlier tokens were on time
    next_due_s: float = math.inf  # of the token after the pending one, if one is pending
    last_token_s: float = 0.0  # unix time of the newest token
    on_time: bool = True  # no deadline has been missed yet

    def define(self, request: RequestFacts, service: ServiceClass, num_uncached: int) -> None:
        """Set the deadlines that the service class defines for the request."""
        if service.ttft_s is not None:
            per_token_s = service.ttft_per_1k_s / 1000
            num_allowed = num_uncached + request.submit.sibling_tokens
            self.first_s = request.arrival_s + service.ttft_s + per_token_s * num_allowed
        else:
            self.first_s = math.inf
        self.due_s = self.next_due_s = self.first_s
        if request.submit.deadline_unix_ns is not None:
            self.completion_s = request.submit.deadline_unix_ns / 1e9
        elif service.completion_s is not None:
            self.completion_s = request.arrival_s + service.completion_s
        else:
            self.completion_s = math.inf

    def take_over_first_token(self, service: ServiceClass, now_s: float) -> None:
        """Check whether a first token from another engine was on time, and set the next deadline."""
        pace = service.tpot_s
        self.last_token_s = now_s
        self.on_time = now_s <= self.due_s
        self.due_s = self.next_due_s = math.inf if pace is None or not self.on_time else self.due_s + pace


class Timeline(msgspec.Struct, eq=False, gc=False):
    """Scheduling events of one sequence and their times, in unix nanoseconds, 0 until reached."""

    scheduled_unix_ns: int = 0
    first_token_unix_ns: int = 0
    finished_unix_ns: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0  # times it gave back a batch slot beyond its tenant's share
    num_overtaken: int = 0  # other sequences that joined since it first lacked blocks at the head of the queue
    delay: Reason | None = None  # why it last could not start
    events: tuple[CoreEvent, ...] = ()

    def note(self, unix_ns: int, kind: EventKind, reason: Reason, other: int = 0) -> None:
        """Record a scheduling decision about this request.

        At most MAX_EVENTS are kept: the first ones and the newest.
        """
        kept = self.events
        if len(kept) == MAX_EVENTS:
            kept = kept[: MAX_EVENTS // 2] + kept[MAX_EVENTS // 2 + 1 :]
        self.events = (*kept, CoreEvent(unix_ns, kind, reason, other))


class DraftCounts(NamedTuple):
    """Draft tokens of one sequence. Replaced when they change, so that sequences without drafts share one."""

    num_drafted: int = 0  # verified
    num_accepted: int = 0


class ExpertUse(msgspec.Struct, eq=False, gc=False):
    """Experts that one sequence used: its shares of the bytes that steps read and moved (`expert_meter`)."""

    read_bytes: int = 0
    moved_bytes: int = 0
    predicted: int = 0  # experts of its newest token, one bit per expert and layer; 0: unknown, or not kept
    num_passed_over: int = 0  # steps in a row in which it lost its turn for its experts; set by the policy
    profile: ExpertProfile | None = None  # of its decoded tokens; None: not sampled


class PaddedRow(NamedTuple):
    """Row of one sequence in padded batching; all zero with other strategies, whose sequences share one."""

    length: int = 0  # to which its batch pads prompts
    num_reserved: int = 0  # positions that its batch reserves
    is_finished: bool = False  # it has finished, and its row is still computed because the batch has not


NO_DRAFTS = DraftCounts()
NOT_PADDED = PaddedRow()
