"""Speculative (next-turn) prefill: computes likely prompts so that a conversation's next turn hits the prefix cache.

It runs below all classes and is designed to cost requests nothing:

- A step computes speculatively only if there is no request, and only so much that a request that arrives meanwhile
  waits no longer than CHUNK_S, as far as predictable, or for one block.
- It uses only blank blocks and blocks of the same conversation that cannot be hit any more. Between two steps it holds
  none. The blocks that it filled are the first to be evicted.
- The next tenant is the one with the fewest computed tokens in proportion to its weight.

The caller predicts the prompts (see `SpeculativePrefillRequest`); `ReturnPatterns` predicts whether they arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.scheduling.kv.kv_groups import KvGroups
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.kv.prefix_search import Hit, PrefixHits
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.speculative_prefill.return_patterns import (
    HORIZON_S,
    ConversationWatch,
    ReturnPatterns,
    WatchedConversation,
)
from moiety_engine.scheduling.speculative_prefill.speculative_account import SpeculativePrefillAccount
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.messages import FinishReason

CHUNK_S = 0.02
LIKELY = 0.4  # minimum probability of the next turn
MAX_WANTED = 256


class SpeculativePrefillOutcome(StrEnum):
    """Outcome of a speculative prefill; reported as the detail of its end."""

    COMPUTED = "computed"
    KNOWN = "known"  # the cache had all blocks, or the prompt has no full block
    UNLIKELY = "unlikely"
    CAME = "came"  # the request arrived before it was computed
    CROWDED = "crowded"  # too many prefills were requested at once
    NO_ROOM = "no_room"  # it would evict cached blocks of others, or the tenant is deleted


@dataclass(slots=True, eq=False)
class _Wanted:
    """One requested prefill.

    `hashes` are those of the prompt's full blocks, `stale` those of blocks that it may replace, the last first.
    """

    sequence: Sequence
    hashes: list[bytes]
    stale: list[bytes]
    asked_s: float
    num_computed: int = 0  # tokens
    num_own: int = 0  # blank blocks that it got from `stale` and has not used yet
    scheduled_unix_ns: int = 0
    num_hits: int = 0  # blocks, in the step being planned
    watched: WatchedConversation[_Wanted] | None = None  # kept after the prefill ends


class SpeculativePrefill:
    """Queue of speculative prefills, owned by the scheduler. Times are passed in."""

    def __init__(self, groups: KvGroups, step_time: StepTimeModel, *, is_possible: bool = True) -> None:
        self.account = SpeculativePrefillAccount(groups.first.block_size, HORIZON_S)
        self.patterns = ReturnPatterns()
        self._groups = groups
        self._step_time = step_time
        self._block_size = groups.first.block_size
        ledger = groups.first
        keeps_everything = ledger.num_tables == 1 and not ledger.layout.has_windows and ledger.states is None
        self.is_possible = is_possible and ledger.caches_prefixes and keeps_everything
        self._wanted: dict[int, _Wanted] = {}  # by key
        self._watch = ConversationWatch[_Wanted](self.patterns)  # by the hash of the prompt's last full block
        self._served: dict[str, float] = {}  # tokens divided by weight, of tenants with requested prefills
        self.is_used = False  # whether any was requested since the start
        self._planned: _Wanted | None = None
        self.ended: list[CoreOutput] = []  # since the last `take_ended`

    # ── requested prefills ──

    def add(self, submit: CoreSubmit, now_ns: int) -> None:
        """Watch for a prompt, and prefill it when there is time if it is likely to arrive.

        `take_ended` reports the outcome.
        """
        assert submit.speculative_prefill is not None, "only speculative prefills are submitted here"
        self.is_used, now_s = True, now_ns / 1e9
        self._advance(now_s)
        apart = self._groups.first.answers_apart
        sequence = Sequence(submit, order=0, seed=0, queued_unix_ns=now_ns, answer_apart=apart)
        hashes = sequence.block_hashes.between(0, len(sequence.tokens) // self._block_size, self._block_size)
        sequence.tokens.append(0)  # placeholder of the next token, so that no step samples after the prompt
        wanted = _Wanted(sequence, list(hashes), self._stale(submit), now_s)
        watched = self._watch.open(hashes[-1], submit.speculative_prefill.pattern, now_s) if hashes else None
        if not self._groups.first.caches(sequence):
            self._end(wanted, SpeculativePrefillOutcome.NO_ROOM, now_ns)
        elif watched is None or max(kv.num_on_device(wanted.hashes) for kv in self._groups) == len(wanted.hashes):
            self._end(wanted, SpeculativePrefillOutcome.KNOWN, now_ns)
        elif self.patterns.likelihood(submit.speculative_prefill.pattern, 0.0) < LIKELY:
            self._end(wanted, SpeculativePrefillOutcome.UNLIKELY, now_ns)
        else:
            if len(self._wanted) >= MAX_WANTED:
                self._end(self._most_crowding(), SpeculativePrefillOutcome.CROWDED, now_ns)
            wanted.watched = watched
            watched.wanted = self._wanted[submit.key] = wanted
            least = min(self._served.values(), default=0.0)
            self._served.setdefault(submit.tenant_id, least)  # absence earns no credit

    def abort(self, key: int, now_ns: int) -> None:
        """Cancel the prefill with this key, if any."""
        wanted = self._wanted.get(key)
        if wanted is not None:
            self._end(wanted, None, now_ns)

    def joined(self, sequence: Sequence, now_ns: int) -> None:
        """Record the first join of a request, with its prefix hits, and check whether it was predicted."""
        if not self._watch and not self.account.open_tokens:
            return
        now_s = now_ns / 1e9
        self._advance(now_s)
        hashes = sequence.block_hashes.between(0, sequence.request.num_prompt // self._block_size, self._block_size)
        sequence.kv.num_speculative = self.account.used(hashes[: sequence.kv.num_cached // self._block_size])
        for block_hash in hashes:
            watched = self._watch.found(block_hash, now_s)
            if watched is not None and watched.wanted is not None and watched.wanted.sequence.key in self._wanted:
                self._end(watched.wanted, SpeculativePrefillOutcome.CAME, now_ns)

    def take_ended(self) -> list[CoreOutput]:
        """Return the prefills that ended since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def forget(self) -> None:
        """Count the open tokens as wasted: the cache's contents are lost."""
        self.account.forget()

    # ── a step ──

    def plan_into(self, planner: StepPlanner, now_ns: int) -> None:
        """Add a chunk of the next prefill to a step that would otherwise be empty."""
        while self._wanted:
            wanted = self._next()
            submit = wanted.sequence.request.submit
            assert submit.speculative_prefill is not None, "only speculative prefills are submitted here"
            if self.patterns.likelihood(submit.speculative_prefill.pattern, now_ns / 1e9 - wanted.asked_s) < LIKELY:
                self._end(wanted, SpeculativePrefillOutcome.UNLIKELY, now_ns)
                continue
            outcome = (
                self._chunk(wanted, planner)
                if self._groups.first.caches(wanted.sequence)
                else SpeculativePrefillOutcome.NO_ROOM
            )
            if outcome is None:
                wanted.scheduled_unix_ns = wanted.scheduled_unix_ns or now_ns
                self._planned = wanted
                return
            self._end(wanted, outcome, now_ns)

    def launched(self, plan: Plan, now_ns: int) -> None:
        """Record the launch of the planned chunk; its blocks count as full from now on and are released."""
        wanted, self._planned = self._planned, None
        if wanted is None:
            return
        sequence, (chunk,) = wanted.sequence, plan.chunks
        kv, num_hits = self._groups.of(sequence), wanted.num_hits
        num_new = len(sequence.kv.blocks) - num_hits
        num_own = min(num_new, wanted.num_own)
        kv.put_back(sequence, num_hits, num_own)
        wanted.num_own -= num_own
        wanted.num_computed += chunk.num_tokens
        self._served[sequence.request.tenant] += chunk.num_tokens / sequence.request.submit.tenant_weight
        self.account.computed(wanted.hashes[num_hits : num_hits + num_new], now_ns / 1e9)
        if num_hits + num_new == len(wanted.hashes):
            self._end(wanted, SpeculativePrefillOutcome.COMPUTED, now_ns)

    # ── internal ──

    def _advance(self, now_s: float) -> None:
        """Advance the watched conversations and expire unused blocks."""
        self._watch.advance(now_s)
        self.account.lapse(now_s)

    def _chunk(self, wanted: _Wanted, planner: StepPlanner) -> SpeculativePrefillOutcome | None:
        """Add a chunk of the prefill to the step; return the outcome if it has ended."""
        sequence, size = wanted.sequence, self._block_size
        if self._groups.count > 1:
            self._groups.choose(sequence, (), set())
        kv = self._groups.of(sequence)
        num_hits = kv.num_on_device(wanted.hashes)
        num_left = len(wanted.hashes) - num_hits
        if not num_left:
            return SpeculativePrefillOutcome.KNOWN if not wanted.num_computed else SpeculativePrefillOutcome.COMPUTED
        if kv.is_on_host(wanted.hashes[num_hits]):
            return (
                SpeculativePrefillOutcome.NO_ROOM
            )  # the device had no blank block, and a request only has to copy it back
        hits = [Hit(block, on_host=False) for block in map(kv.pool.find, wanted.hashes[:num_hits]) if block is not None]
        rows = min(num_left * size, planner.max_prefill_tokens(sequence))
        num_blocks = self._num_in_time(planner, num_hits * size, rows)
        num_blocks = min(num_blocks, self._make_blank(wanted, kv, num_blocks))
        if not num_blocks or not kv.start(sequence, PrefixHits(num_hits, hits), num_hits * size):
            return SpeculativePrefillOutcome.NO_ROOM
        sequence.kv.peak_computed = sequence.kv.num_computed
        wanted.num_hits = num_hits
        planner.add_prefill(sequence, num_blocks * size)
        if not planner.prefills(sequence):
            kv.put_back(sequence, num_hits, 0)
            return SpeculativePrefillOutcome.NO_ROOM
        return None

    def _num_in_time(self, planner: StepPlanner, context: int, rows: int) -> int:
        """Return the blocks that a step computes within CHUNK_S, at least one; 0 if it has no rows for one."""
        tokens = self._step_time.largest_prefill(planner.shape, context, CHUNK_S, rows)
        return min(max(1, tokens // self._block_size), rows // self._block_size)

    def _make_blank(self, wanted: _Wanted, kv: KvLedger, num_blocks: int) -> int:
        """Blank up to `num_blocks` blocks, those of the conversation first; return how many are blank."""
        while wanted.stale and wanted.num_own < num_blocks:
            wanted.num_own += kv.blank(wanted.stale.pop(0))
        return min(num_blocks, kv.pool.num_blank)

    def _stale(self, submit: CoreSubmit) -> list[bytes]:
        """Return the hashes of the previous turn's blocks that the next turn cannot hit, the last first."""
        seen = submit.speculative_prefill
        assert seen is not None
        ids = submit.prompt_ids[: seen.num_shared] + seen.other_ids
        asked = msgspec.structs.replace(submit, prompt_ids=ids[: seen.num_asked], resumed_ids=ids[seen.num_asked :])
        apart = self._groups.first.answers_apart
        before = Sequence(asked, order=0, seed=0, answer_apart=apart)
        begin = min(seen.num_shared, seen.num_asked) if apart else seen.num_shared
        hashes = before.block_hashes.between(0, len(ids) // self._block_size, self._block_size)
        return list(reversed(hashes[begin // self._block_size :]))

    def _next(self) -> _Wanted:
        """Return the oldest prefill of the tenant with the least service."""
        tenant = min({one.sequence.request.tenant for one in self._wanted.values()}, key=self._served.__getitem__)
        return next(one for one in self._wanted.values() if one.sequence.request.tenant == tenant)

    def _most_crowding(self) -> _Wanted:
        """Return the oldest prefill of the tenant with the most requested prefills."""
        counts: dict[str, int] = {}
        for one in self._wanted.values():
            counts[one.sequence.request.tenant] = counts.get(one.sequence.request.tenant, 0) + 1
        tenant = max(counts, key=counts.__getitem__)
        return next(one for one in self._wanted.values() if one.sequence.request.tenant == tenant)

    def _end(self, wanted: _Wanted, outcome: SpeculativePrefillOutcome | None, now_ns: int) -> None:
        """End a prefill. Without an outcome, its caller has cancelled it."""
        sequence = wanted.sequence
        self._wanted.pop(sequence.key, None)
        if wanted.watched is not None:
            wanted.watched.wanted = None
            wanted.watched = None
        if not any(one.sequence.request.tenant == sequence.request.tenant for one in self._wanted.values()):
            self._served.pop(sequence.request.tenant, None)
        sequence.timeline.finished_unix_ns = now_ns
        finish = CoreFinish(
            reason=FinishReason.ABORT if outcome is None else FinishReason.STOP,
            detail=outcome or "",
            num_cached_tokens=0,
            num_output_tokens=0,
            scheduled_unix_ns=wanted.scheduled_unix_ns,
            first_token_unix_ns=0,
            finished_unix_ns=now_ns,
            served_class=sequence.service.name,
            events=(),
            num_recomputed_tokens=0,
            num_speculative_tokens=wanted.num_computed,
            expert_read_bytes=sequence.experts.read_bytes,
            expert_moved_bytes=sequence.experts.moved_bytes,
        )
        self.ended.append(CoreOutput(sequence.key, [], None, finish))
