"""Computing prompts that are likely to come, so that a conversation's next turn finds more in the prefix cache.

A class below all others, made so that nobody can be worse off for it:

- A step computes for it only if there is no request, and then so little that whoever comes meanwhile waits for no
  longer than CHUNK_S, as far as that can be predicted, or for one block.
- It takes blank blocks only, and blocks of the very conversation that cannot be hit any more. Between two steps it
  holds nothing. What it put into blank blocks is the first that is evicted.
- Among tenants, that one is next for which least was computed in proportion to its weight.

What is foreseen is told by who asks (see `Foreseeing`); whether it is likely, by `ReturnPatterns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from moiety_engine.messages import CoreFinish, CoreOutput, CoreSubmit
from moiety_engine.scheduling.kv_groups import KvGroups
from moiety_engine.scheduling.kv_ledger import Hit, KvLedger
from moiety_engine.scheduling.plan import Plan
from moiety_engine.scheduling.speculative_prefill.account import SpeculativePrefillAccount
from moiety_engine.scheduling.speculative_prefill.habits import (
    HORIZON_S,
    ConversationWatch,
    ReturnPatterns,
    WatchedConversation,
)
from moiety_engine.scheduling.step_planner import StepPlanner
from moiety_engine.scheduling.step_time_model import StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.messages import FinishReason

CHUNK_S = 0.02
LIKELY = 0.4  # what is less likely to come is not computed
MAX_WANTED = 256


class SpeculativePrefillOutcome(StrEnum):
    """How something foreseen ended; told as the detail of its end."""

    COMPUTED = "computed"
    KNOWN = "known"  # the cache had it all, or it is no whole block
    UNLIKELY = "unlikely"
    CAME = "came"  # before it was computed
    CROWDED = "crowded"  # too much was foreseen at once
    NO_ROOM = "no_room"  # without evicting what others have in the cache; there is none for who was erased


@dataclass(slots=True, eq=False)
class _Wanted:
    """One prompt. `hashes` are those of its whole blocks; `stale` those of blocks that give way, the last first."""

    sequence: Sequence
    hashes: list[bytes]
    stale: list[bytes]
    asked_s: float
    num_computed: int = 0  # tokens
    num_own: int = 0  # blank blocks that it got from `stale` and has not used yet
    scheduled_unix_ns: int = 0
    num_hits: int = 0  # blocks, of the step that is planned
    watched: WatchedConversation[_Wanted] | None = None  # for its coming, which outlasts it


class SpeculativePrefill:
    """Owned by the scheduler. Times are handed in."""

    def __init__(self, groups: KvGroups, step_time: StepTimeModel, *, is_possible: bool = True) -> None:
        self.account = SpeculativePrefillAccount(groups.first.block_size, HORIZON_S)
        self.habits = ReturnPatterns()
        self._groups = groups
        self._step_time = step_time
        self._block_size = groups.first.block_size
        self.is_possible = is_possible and groups.first.caches_prefixes
        self._wanted: dict[int, _Wanted] = {}  # by key
        self._watch = ConversationWatch[_Wanted](self.habits)  # for prompts, by the hash of their last whole block
        self._served: dict[str, float] = {}  # tokens over weight, of tenants that something is wanted for
        self._planned: _Wanted | None = None
        self._ended: list[CoreOutput] = []

    # ── what is foreseen comes and goes ──

    def add(self, submit: CoreSubmit, now_ns: int) -> None:
        """ConversationWatch for a prompt, and compute it when there is time, if it is likely enough to come. How
        that ended is told by `take_ended`."""
        assert submit.speculative_prefill is not None, "only what is foreseen comes here"
        now_s = now_ns / 1e9
        self._advance(now_s)
        apart = self._groups.first.answers_apart
        sequence = Sequence(submit, order=0, seed=0, queued_unix_ns=now_ns, answer_apart=apart)
        hashes = sequence.hashes_between(0, len(sequence.tokens) // self._block_size, self._block_size)
        sequence.tokens.append(0)  # in place of what will follow, so that no step takes it for a prompt's end
        wanted = _Wanted(sequence, list(hashes), self._stale(submit), now_s)
        watched = self._watch.open(hashes[-1], submit.speculative_prefill.habit, now_s) if hashes else None
        if not self._groups.first.caches(sequence):
            self._end(wanted, SpeculativePrefillOutcome.NO_ROOM, now_ns)
        elif watched is None or max(kv.num_on_device(wanted.hashes) for kv in self._groups) == len(wanted.hashes):
            self._end(wanted, SpeculativePrefillOutcome.KNOWN, now_ns)
        elif self.habits.likelihood(submit.speculative_prefill.habit, 0.0) < LIKELY:
            self._end(wanted, SpeculativePrefillOutcome.UNLIKELY, now_ns)
        else:
            if len(self._wanted) >= MAX_WANTED:
                self._end(self._most_crowding(), SpeculativePrefillOutcome.CROWDED, now_ns)
            wanted.watched = watched
            watched.wanted = self._wanted[submit.key] = wanted
            least = min(self._served.values(), default=0.0)
            self._served.setdefault(submit.tenant_id, least)  # absence earns nothing

    def abort(self, key: int, now_ns: int) -> None:
        """Give up what is wanted under this key, if anything is."""
        wanted = self._wanted.get(key)
        if wanted is not None:
            self._end(wanted, None, now_ns)

    def joined(self, sequence: Sequence, now_ns: int) -> None:
        """A request has joined the batch for the first time, with its hits: see whether it was foreseen."""
        if not self._watch and not self.account.open_tokens:
            return
        now_s = now_ns / 1e9
        self._advance(now_s)
        hashes = sequence.hashes_between(0, sequence.num_prompt // self._block_size, self._block_size)
        sequence.num_speculative = self.account.used(hashes[: sequence.num_cached // self._block_size])
        for block_hash in hashes:
            watched = self._watch.found(block_hash, now_s)
            if watched is not None and watched.wanted is not None and watched.wanted.sequence.key in self._wanted:
                self._end(watched.wanted, SpeculativePrefillOutcome.CAME, now_ns)

    def take_ended(self) -> list[CoreOutput]:
        """How what was foreseen ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self) -> None:
        """The cache's contents are lost. Nothing is wanted."""
        self.account.forget()

    # ── a step ──

    def plan_into(self, planner: StepPlanner, now_ns: int) -> None:
        """A chunk of what is most due, for a step that would do nothing otherwise."""
        while self._wanted:
            wanted = self._next()
            submit = wanted.sequence.submit
            assert submit.speculative_prefill is not None, "only what is foreseen comes here"
            if self.habits.likelihood(submit.speculative_prefill.habit, now_ns / 1e9 - wanted.asked_s) < LIKELY:
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
        """The step with what was planned runs: its blocks are full from now on, and go back."""
        wanted, self._planned = self._planned, None
        if wanted is None:
            return
        sequence, (chunk,) = wanted.sequence, plan.chunks
        kv, num_hits = self._groups.of(sequence), wanted.num_hits
        num_new = len(sequence.blocks) - num_hits
        num_own = min(num_new, wanted.num_own)
        kv.put_back(sequence, num_hits, num_own)
        wanted.num_own -= num_own
        wanted.num_computed += chunk.num_tokens
        self._served[sequence.tenant] += chunk.num_tokens / sequence.submit.tenant_weight
        self.account.computed(wanted.hashes[num_hits : num_hits + num_new], now_ns / 1e9)
        if num_hits + num_new == len(wanted.hashes):
            self._end(wanted, SpeculativePrefillOutcome.COMPUTED, now_ns)

    # ── within ──

    def _advance(self, now_s: float) -> None:
        """What has not come by now is less likely to, or is not going to any more."""
        self._watch.advance(now_s)
        self.account.lapse(now_s)

    def _chunk(self, wanted: _Wanted, planner: StepPlanner) -> SpeculativePrefillOutcome | None:
        """Give the step a part of it; or say why there is none to be given."""
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
            )  # on the device there was none, and a request has only to copy it back
        hits = [Hit(block, on_host=False) for block in map(kv.pool.find, wanted.hashes[:num_hits]) if block is not None]
        rows = min(num_left * size, planner.prefill_room(sequence))
        num_blocks = self._num_in_time(planner, num_hits * size, rows)
        num_blocks = min(num_blocks, self._make_blank(wanted, kv, num_blocks))
        if not num_blocks or not kv.start(sequence, hits, num_hits * size):
            return SpeculativePrefillOutcome.NO_ROOM
        sequence.peak_computed = sequence.num_computed
        wanted.num_hits = num_hits
        planner.add_prefill(sequence, num_blocks * size)
        if not planner.prefills(sequence):
            kv.put_back(sequence, num_hits, 0)
            return SpeculativePrefillOutcome.NO_ROOM
        return None

    def _num_in_time(self, planner: StepPlanner, context: int, rows: int) -> int:
        """Blocks that a step computes in no more than CHUNK_S, or one; 0 where it has no rows for one."""
        tokens = self._step_time.largest_prefill(planner.shape, context, CHUNK_S, rows)
        return min(max(1, tokens // self._block_size), rows // self._block_size)

    def _make_blank(self, wanted: _Wanted, kv: KvLedger, num_blocks: int) -> int:
        """See that so many blocks are blank, those of the conversation first. As many as there are, if fewer."""
        while wanted.stale and wanted.num_own < num_blocks:
            wanted.num_own += kv.blank(wanted.stale.pop(0))
        return min(num_blocks, kv.pool.num_blank)

    def _stale(self, submit: CoreSubmit) -> list[bytes]:
        """Of the request before: the hashes of blocks that its next turn cannot hit, the last first."""
        seen = submit.speculative_prefill
        assert seen is not None
        ids = submit.prompt_ids[: seen.num_shared] + seen.other_ids
        asked = msgspec.structs.replace(submit, prompt_ids=ids[: seen.num_asked], resumed_ids=ids[seen.num_asked :])
        apart = self._groups.first.answers_apart
        before = Sequence(asked, order=0, seed=0, answer_apart=apart)
        begin = min(seen.num_shared, seen.num_asked) if apart else seen.num_shared
        hashes = before.hashes_between(0, len(ids) // self._block_size, self._block_size)
        return list(reversed(hashes[begin // self._block_size :]))

    def _next(self) -> _Wanted:
        """Of the tenant that has got least, what was asked for first."""
        tenant = min({one.sequence.tenant for one in self._wanted.values()}, key=self._served.__getitem__)
        return next(one for one in self._wanted.values() if one.sequence.tenant == tenant)

    def _most_crowding(self) -> _Wanted:
        """The oldest of the tenant of which most is wanted."""
        counts: dict[str, int] = {}
        for one in self._wanted.values():
            counts[one.sequence.tenant] = counts.get(one.sequence.tenant, 0) + 1
        tenant = max(counts, key=counts.__getitem__)
        return next(one for one in self._wanted.values() if one.sequence.tenant == tenant)

    def _end(self, wanted: _Wanted, outcome: SpeculativePrefillOutcome | None, now_ns: int) -> None:
        """Nothing more is wanted of it. Without an outcome it was given up by who had asked."""
        sequence = wanted.sequence
        self._wanted.pop(sequence.key, None)
        if wanted.watched is not None:
            wanted.watched.wanted = None
            wanted.watched = None
        if not any(one.sequence.tenant == sequence.tenant for one in self._wanted.values()):
            self._served.pop(sequence.tenant, None)
        finish = CoreFinish(
            reason=FinishReason.ABORT if outcome is None else FinishReason.STOP,
            detail=outcome or "",
            num_cached_tokens=0,
            num_output_tokens=0,
            scheduled_unix_ns=wanted.scheduled_unix_ns,
            first_token_unix_ns=0,
            finished_unix_ns=now_ns,
            served_class=sequence.service.name,
            events=[],
            num_recomputed_tokens=0,
            num_speculative_tokens=wanted.num_computed,
        )
        self._ended.append(CoreOutput(sequence.key, [], None, finish))
