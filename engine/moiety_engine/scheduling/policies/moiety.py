"""Our own policy: every class its promise, every tenant its share.

Who wants prefill stands in one of three buckets, and moves between them at times that are known when it enters. *At
risk*: its deadline is near enough that it must go now. *Safe*: there is time. *Relegated*: its promise cannot be kept
any more, and it must not drag others down. Those at risk go first, the better rank before the worse; then, rank by
rank, the safe and after them the relegated, who so delay no one whose promise still stands. In a bucket and rank, the tenant with the lowest virtual token counter goes first; of a tenant, the earliest deadline, blended with remaining
work as the load grows. A small part of the time is kept for those who have waited beyond their class's bound and for tenants
that have not been served for long, so that nobody starves.

A step lasts no longer than the running requests' next tokens can wait, and no request joins whose decoding would make
steps too long for the pace that classes of these minutes were promised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from moiety_engine.scheduling.admission import PromptFlow
from moiety_engine.scheduling.policies.accounts import OUTPUT_WEIGHT, Account, Accounts, FairQueue
from moiety_engine.scheduling.policy import BatchView, Policy, PolicyContext, StepBudget, Verdict
from moiety_engine.scheduling.steptime import StepShape
from moiety_engine.sequence import Place, Sequence
from moiety_wire.classes import OverloadAction, ServiceClass
from moiety_wire.messages import EventKind, Reason

AT_RISK, SAFE, RELEGATED = range(3)
_PREEMPTION_MEAN_S = 20.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """The policy's constants, and switches that take a part of it away for comparison."""

    chunk_sizing: bool = True
    relegation: bool = True
    fairness: bool = True
    admission: bool = True
    slack_used: float = 0.35  # of the time until the next token is due
    slack_used_if_urgent: float = 0.5  # the same, while prompts of the best rank are at risk
    longest_step_s: float = 0.4  # whatever the slack
    ttft_part_of_step: float = 0.3  # a step takes at most this part of the shortest TTFT promised of late
    decode_part: float = 0.75  # of the shortest pace promised of late, that decoding alone may take
    floor_tokens: int = 16  # prompt tokens a step whatever the slack
    risk_factor: float = 2.0  # at risk when this many times the predicted need is left
    boost_part: float = 0.05  # of the time, for those who waited too long
    hungry_s: float = 20.0  # a tenant that waits and was not served for so long
    preemption_part: float = 0.035  # of the time, that giving way for want of blocks may cost; overcommitment follows it
    overcommit_range: tuple[float, float] = (0.85, 1.5)  # of all blocks, that the batch may be predicted to want
    sharing_part: float = 0.02  # of the time, for taking blocks from tenants that hold more than their share
    share_kept: float = 1.0  # of its share of blocks, that a tenant keeps when others are given theirs
    prepaid: float = 0.5  # of an answer's expected length, charged when it starts
    ttft_margin: float = 0.85  # of the TTFT promised, up to which a request is let in
    wait_unasked: float = 0.4  # of the TTFT promised, that may be waited where the prompt alone takes too long
    max_tenant_waiting: int = 2048
    remembered_s: float = 30.0  # for how long a class that was seen is reckoned with
    max_preemptions: int = 2
    reserve_quantile: float = 0.95


class Moiety(Policy):
    """See the module's text."""

    name = "moiety"
    sizes_chunks = True
    limits_preemptions = True

    def __init__(self, context: PolicyContext, tuning: Tuning | None = None) -> None:
        super().__init__(context)
        self.tuning = tuning or Tuning()
        self._accounts: dict[int, Accounts] = {}  # by rank
        self._queues: dict[tuple[int, int], FairQueue] = {}  # by (bucket, rank)
        self._levels: list[tuple[int, int]] = []  # their keys, sorted
        self._moves: list[tuple[float, int, int, Sequence]] = []  # when who goes into the next bucket
        self._waited: list[tuple[float, int, int, Sequence]] = []  # when who has waited too long
        self._hungry: list[tuple[float, int, Account]] = []  # when which tenant will have gone without for long
        self._flow = PromptFlow(context.step_time, context.max_batch_tokens)
        self._classes: dict[str, tuple[float, ServiceClass]] = {}  # seen last when
        self._pace_s = math.inf  # the shortest promised of late, as the next two
        self._ttft_s = math.inf
        self._best_rank = 0
        self._refresh_at_s = 0.0
        self._boost_credit_s = 0.0
        self._overcommit = 1.0
        self._preemption_share = 0.0  # running mean of the part of the time that it costs
        self._peak_held_back = False
        self._sharing_credit_s = 0.0
        self._token_s = 0.0  # predicted, a prompt token's in a full step
        self._decode_s = 0.0  # running mean of a step's time
        self._ties = 0
        self._blend = 0.0

    # ── the queue ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        rank = sequence.service.rank
        accounts = self._accounts.get(rank)
        if accounts is None:
            accounts = self._accounts[rank] = Accounts()
        account = accounts.arrived(sequence, now_s)
        sequence.account = account
        account.pending_tokens += sequence.num_prompt
        self._flow.came(rank, sequence.num_prompt, now_s)
        self._classes[sequence.service.name] = (now_s, sequence.service)
        if now_s >= self._refresh_at_s:
            self._refresh(now_s)
        else:
            self._reckon_with(sequence.service)
        sequence.predicted_output = self.context.lengths.expected(sequence.tenant, at_most=sequence.submit.max_tokens)

    def push(self, sequence: Sequence, now_s: float) -> None:
        account = sequence.account
        if sequence.enter_queue():
            self._num_queued += 1
            account.num_queued += 1
            if account.num_queued == 1:
                self._accounts[sequence.service.rank].queued(account)
                self._ties += 1
                heappush(self._hungry, (account.last_served_s + self.tuning.hungry_s, self._ties, account))
        if not sequence.boosted:
            since_s = sequence.arrival_s if sequence.scheduled_unix_ns == 0 else now_s
            item = (since_s + sequence.service.max_queue_s, sequence.order, sequence.entry, sequence)
            heappush(self._waited, item)
        self._enter(sequence, now_s)
        if len(self._moves) + len(self._waited) > 256 + 4 * self._num_queued:
            for heap in (self._moves, self._waited):
                heap[:] = [item for item in heap if item[2] == item[3].entry]
                heapify(heap)

    def pop(self, now_s: float) -> Sequence | None:
        while self._moves and self._moves[0][0] <= now_s:
            _, _, entry, sequence = heappop(self._moves)
            if entry == sequence.entry:
                sequence.entry += 2  # its old place is void
                self._enter(sequence, now_s)
        found = self._pop_starving(now_s) if self._boost_credit_s > 0 else None
        if found is None:
            for level in self._levels:
                queue = self._queues[level]
                if queue and (found := queue.pop()) is not None:
                    break
        if found is not None:
            self._leave(found)
        return found

    def discard(self, sequence: Sequence) -> None:
        if sequence.entry & 1:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._num_queued -= sequence.leave_queue()
        sequence.account.num_queued -= 1

    def _enter(self, sequence: Sequence, now_s: float) -> None:
        """Into the queue of its bucket, with the time at which it moves on."""
        bucket, moves_at_s = self._bucket(sequence, now_s)
        if bucket == RELEGATED and not sequence.relegated:
            sequence.relegated = True
            sequence.note(int(now_s * 1e9), EventKind.RELEGATED, Reason.BEYOND_REPAIR)
            self.context.tally.of(sequence.service.name).relegated += 1
        sequence.bucket = bucket
        level = (bucket, sequence.service.rank)
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = FairQueue()
            self._levels = sorted(self._queues, key=_turn)
        queue.push(sequence.account, sequence, self._key(sequence))
        if moves_at_s < math.inf:
            heappush(self._moves, (moves_at_s, sequence.order, sequence.entry, sequence))

    def _bucket(self, sequence: Sequence, now_s: float) -> tuple[int, float]:
        """(bucket, when it moves on)."""
        need_s = sequence.num_uncomputed * self._token_s
        if sequence.service.ttft_s is not None:
            if sequence.num_output:  # it returns in the middle of its answer
                if not sequence.on_time:
                    return (RELEGATED if self.tuning.relegation else SAFE), math.inf
                deadline_s = sequence.due_s
            else:
                deadline_s = sequence.first_deadline_s
            if deadline_s == math.inf:
                return SAFE, math.inf
        else:
            deadline_s = sequence.completion_deadline_s
            left = max(1.0, sequence.predicted_output - sequence.num_output)
            need_s += left * self._decode_s
        late_s = deadline_s - need_s
        risk_s = deadline_s - self.tuning.risk_factor * need_s - 2 * self._longest_step_s()
        if now_s >= late_s:
            return (RELEGATED if self.tuning.relegation else AT_RISK), math.inf
        if now_s >= risk_s:
            return AT_RISK, (late_s if self.tuning.relegation else math.inf)
        return SAFE, risk_s

    def _key(self, sequence: Sequence) -> float:
        """Earliest deadline first, shifted by work as the load grows."""
        service = sequence.service
        if sequence.bucket == RELEGATED:
            return sequence.arrival_s
        if service.ttft_s is not None:
            deadline_s, horizon_s = sequence.first_deadline_s, service.ttft_s
        else:
            deadline_s, horizon_s = sequence.completion_deadline_s, service.completion_s or 0.0
        work_s = sequence.num_uncomputed * self._token_s
        return deadline_s + self._blend * horizon_s * work_s

    def _pop_starving(self, now_s: float) -> Sequence | None:
        """Somebody who has waited too long, or of a tenant that was not served for long."""
        while self._waited and self._waited[0][0] <= now_s:
            _, _, entry, sequence = heappop(self._waited)
            if entry == sequence.entry:
                if not sequence.boosted:
                    sequence.boosted = True
                    sequence.note(int(now_s * 1e9), EventKind.BOOSTED, Reason.WAITED_TOO_LONG)
                    self.context.tally.of(sequence.service.name).boosted += 1
                found = sequence if sequence.relegated else self._pop_rank(sequence.service.rank)
                if found is not sequence:
                    heappush(self._waited, (now_s, sequence.order, entry, sequence))  # its rank's turn, not its own
                if found is not None:
                    self._boost_credit_s -= self._cost_s(found)
                    return found
        while self._hungry and self._hungry[0][0] <= now_s:
            _, _, account = heappop(self._hungry)
            if account.num_queued == 0:
                continue
            due_s = account.last_served_s + self.tuning.hungry_s
            self._ties += 1
            if due_s > now_s:
                heappush(self._hungry, (due_s, self._ties, account))
                continue
            heappush(self._hungry, (now_s + self.tuning.hungry_s, self._ties, account))
            for level in self._levels:
                found = self._queues[level].pop_of(account)
                if found is not None:
                    self._boost_credit_s -= self._cost_s(found)
                    return found
        return None

    def _pop_rank(self, rank: int) -> Sequence | None:
        """The first of one rank, in the rank's own order."""
        for level in self._levels:
            if level[1] == rank and (found := self._queues[level].pop()) is not None:
                return found
        return None

    def _cost_s(self, sequence: Sequence) -> float:
        return sequence.num_uncomputed * self._token_s + 0.001

    # ── what happened ──

    def started(self, sequence: Sequence, num_uncached: int, now_s: float) -> None:
        account = sequence.account
        account.pending_tokens -= sequence.num_prompt
        account.last_served_s = now_s
        self._flow.left(sequence.service.rank, sequence.num_prompt)
        sequence.charged_tokens = self.tuning.prepaid * sequence.predicted_output
        account.counter += (num_uncached + OUTPUT_WEIGHT * sequence.charged_tokens) / account.weight
        if not sequence.service.preemptible:
            high = self.context.lengths.high(
                sequence.tenant, self.tuning.reserve_quantile, at_most=sequence.submit.max_tokens
            )
            sequence.reserved_tokens = sequence.num_prompt + high

    def decoded(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            num_output = len(sequence.tokens) - sequence.num_prompt
            if num_output > sequence.charged_tokens:
                sequence.charged_tokens += 1
                sequence.account.counter += OUTPUT_WEIGHT / sequence.account.weight
                if num_output > sequence.predicted_output:
                    sequence.predicted_output = self.context.lengths.expected(
                        sequence.tenant, longer_than=num_output, at_most=sequence.submit.max_tokens
                    )

    def stepped(self, seconds: float, shape: StepShape, now_s: float) -> None:
        self._sharing_credit_s = min(1.0, self._sharing_credit_s + self.tuning.sharing_part * seconds)
        self._boost_credit_s = min(1.0, self._boost_credit_s + self.tuning.boost_part * seconds)
        self._decode_s += 0.05 * (seconds - self._decode_s)
        self._preemption_share *= 1 - min(1.0, seconds / _PREEMPTION_MEAN_S)
        low, high = self.tuning.overcommit_range
        if self._preemption_share > self.tuning.preemption_part:
            self._overcommit = max(low, self._overcommit - 0.01 * seconds)
        elif self._peak_held_back:
            self._overcommit = min(high, self._overcommit + 0.01 * seconds)
        self._peak_held_back = False
        self._flow.stepped(seconds, shape.prefill_rows, backlogged=self._num_queued > 0)

    def preempted(self, sequence: Sequence, beneficiary: Sequence | None, cost_s: float) -> None:
        self._preemption_share += cost_s / _PREEMPTION_MEAN_S
        if beneficiary is not None and beneficiary.service.rank == sequence.service.rank:
            self._sharing_credit_s -= cost_s

    def ended(self, sequence: Sequence, now_s: float) -> None:
        account: Account = sequence.account
        if sequence.scheduled_unix_ns == 0:
            account.pending_tokens -= sequence.num_prompt
            self._flow.left(sequence.service.rank, sequence.num_prompt)
        else:
            unused = sequence.charged_tokens - sequence.num_output
            if unused > 0:
                account.counter -= OUTPUT_WEIGHT * unused / account.weight
                account.version += 1
                for bucket in (AT_RISK, SAFE, RELEGATED):
                    queue = self._queues.get((bucket, sequence.service.rank))
                    if queue is not None:
                        queue.fell(account)
        self._accounts[sequence.service.rank].ended(account)

    # ── what to do ──

    def admit(self, sequence: Sequence, num_uncached: int, now_s: float) -> Verdict:
        if now_s >= self._refresh_at_s:
            self._refresh(now_s)
        service: ServiceClass | None = sequence.service
        first: Verdict | None = None
        while service is not None:
            verdict = self._judge(sequence, service, num_uncached, now_s)
            if verdict.service is not None:
                return verdict if first is None else Verdict(service, first.reason, verdict.predicted_ttft_s)
            first = first or verdict
            downgrades = service is sequence.service and service.on_overload is OverloadAction.DOWNGRADE
            service = sequence.submit.fallback if downgrades else None
        assert first is not None
        return first

    def _judge(self, sequence: Sequence, service: ServiceClass, num_uncached: int, now_s: float) -> Verdict:
        accounts = self._accounts.get(service.rank)
        account = accounts.get(sequence.tenant) if accounts is not None else None
        if account is not None and account.num_queued >= self.tuning.max_tenant_waiting:
            retry_s = self._flow.wait_s(service.rank, account.pending_tokens, 1.0, now_s) / 2
            return Verdict(None, Reason.TENANT_QUEUE_FULL, retry_after_s=max(1.0, retry_s))
        weight = max(1e-6, sequence.submit.tenant_weight * service.weight)
        total = accounts.total_weight if accounts is not None else 0.0
        own = account.pending_tokens if account is not None else 0
        fair_part = weight / max(weight, total if account is not None and account.active else total + weight)
        wait_s = self._flow.wait_s(service.rank, own, fair_part, now_s)
        alone_s = num_uncached * self._token_s + self._decode_s
        predicted_s = wait_s + alone_s
        if service.ttft_s is None or not self.tuning.admission:
            return Verdict(service, Reason.IN_TIME, predicted_s)
        target_s = service.ttft_s + service.ttft_per_1k_s * num_uncached / 1000
        if predicted_s <= self.tuning.ttft_margin * target_s:
            return Verdict(service, Reason.IN_TIME, predicted_s)
        if service.on_overload is OverloadAction.QUEUE or wait_s <= self.tuning.wait_unasked * target_s:
            return Verdict(service, Reason.ACCEPTED_LATE, predicted_s)
        return Verdict(None, Reason.PREDICTED_LATE, predicted_s, max(1.0, predicted_s - target_s))

    def overflow(self, sequence: Sequence) -> Verdict:
        wait_s = self._flow.wait_s(sequence.service.rank, math.inf, 1.0, sequence.arrival_s)
        return Verdict(None, Reason.QUEUE_FULL, retry_after_s=max(1.0, wait_s / 2))

    def predicted_ttft_s(self) -> dict[str, float]:
        return {
            name: self._flow.wait_s(service.rank, math.inf, 1.0, seen_s) + self._decode_s
            for name, (seen_s, service) in self._classes.items()
        }

    def step_budget(self, view: BatchView, now_s: float) -> StepBudget | None:
        if not self.tuning.chunk_sizing:
            return None
        first = self._levels[0] if self._levels else None
        urgent = first is not None and first == (AT_RISK, self._best_rank) and bool(self._queues[first])
        part = self.tuning.slack_used_if_urgent if urgent else self.tuning.slack_used
        seconds = min(self._longest_step_s(), part * view.slack_s)
        return StepBudget(seconds, self.tuning.floor_tokens)

    def delays(self, sequence: Sequence, view: BatchView, num_blocks: int, now_s: float) -> Reason | None:
        pace_s = self._pace_s
        if pace_s < math.inf and view.shape.decode_rows and self.tuning.chunk_sizing:
            rows, context = len(view.running) + 1, view.shape.decode_context + len(sequence.tokens)
            alone_s = self.context.step_time.predict_s(StepShape(rows, 0, context, 0))
            if alone_s > self.tuning.decode_part * pace_s and not self._goes_first(sequence, view):
                return Reason.BATCH_FULL
        if not sequence.service.preemptible and not self._can_reserve(sequence, view):
            return Reason.NO_BLOCKS
        if view.somebody_lacks_blocks and self._over_share(sequence, view, num_blocks):
            return Reason.SHARE_FULL
        left = view.blocks_free - num_blocks
        urgent = sequence.bucket == AT_RISK and any(s.service.rank > sequence.service.rank for s in view.running)
        if not urgent and left < view.blocks_total / 2 and not self._peak_fits(view, sequence):
            return Reason.NO_BLOCKS
        return None

    def may_overtake(self, blocked: Sequence, now_s: float) -> bool:
        return not blocked.boosted

    def victims(self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float) -> list[Sequence]:
        batch = list(running)
        if beneficiary is None:
            chosen = [s for s in batch if not self._is_protected(s)]
        else:
            at_risk, rank = beneficiary.bucket == AT_RISK, beneficiary.service.rank
            over = self._over_their_share(batch, beneficiary)
            chosen = [
                s
                for s in batch
                if s is not beneficiary
                and ((at_risk and s.service.rank > rank) or s in over)
                and not self._is_protected(s)
            ]
        return sorted(chosen, key=self._giving_way, reverse=True)

    # ── within ──

    def _giving_way(self, s: Sequence) -> tuple[int, bool, float, float, int]:
        """Lowest class, then what cannot keep its promise, then the latest deadline, then what has done least of what it
        is predicted to do, then the youngest."""
        deadline_s = s.completion_deadline_s if s.due_s == math.inf else s.due_s
        done = s.num_computed / (s.num_prompt + max(s.predicted_output, s.num_output + 1.0))
        return s.service.rank, s.relegated, min(deadline_s, 1e18), -done, s.order

    def _over_their_share(self, batch: list[Sequence], beneficiary: Sequence) -> set[Sequence]:
        """Sequences of the beneficiary's rank whose tenants hold more than their share of blocks without them, while the
        beneficiary's holds less than its own."""
        rank = beneficiary.service.rank
        blocks: dict[Account, int] = {}
        for s in batch:
            if s.service.rank == rank:
                blocks[s.account] = blocks.get(s.account, 0) + len(s.blocks)
        total = self.context.num_blocks / max(1e-9, self._accounts[rank].total_weight)
        own: Account = beneficiary.account
        wanted = -(-len(beneficiary.tokens) // self.context.block_size)
        if not self.tuning.fairness or self._sharing_credit_s <= 0 or blocks.get(own, 0) + wanted > total * own.weight:
            return set()
        over = set()
        newest_first = sorted((s for s in batch if s.service.rank == rank), key=lambda s: -s.order)
        for s in newest_first:
            account: Account = s.account
            left = blocks[account] - len(s.blocks)
            if account is not own and left >= self.tuning.share_kept * total * account.weight:
                over.add(s)
                blocks[account] = left
        return over

    def _is_protected(self, s: Sequence) -> bool:
        if s.num_preemptions >= self.tuning.max_preemptions:
            return True
        return not s.service.preemptible and len(s.tokens) <= s.reserved_tokens

    def _goes_first(self, sequence: Sequence, view: BatchView) -> bool:
        """Whether it is of a better rank than what a longer step would harm: nobody's pace stands above it."""
        return sequence.bucket == AT_RISK and all(
            s.service.rank >= sequence.service.rank for s in view.running if s.due_s < math.inf
        )

    def _can_reserve(self, sequence: Sequence, view: BatchView) -> bool:
        high = self.context.lengths.high(
            sequence.tenant, self.tuning.reserve_quantile, at_most=sequence.submit.max_tokens
        )
        wanted = sequence.num_prompt + high
        held = sum(max(s.reserved_tokens, len(s.tokens)) for s in view.running if self._is_protected(s))
        return held + wanted <= view.blocks_total * self.context.block_size or held == 0

    def _over_share(self, sequence: Sequence, view: BatchView, num_blocks: int) -> bool:
        """Whether its tenant would hold more than its share of blocks, while others wait for some."""
        accounts = self._accounts[sequence.service.rank]
        account: Account = sequence.account
        share = account.weight / max(account.weight, accounts.total_weight)
        return view.tenant_blocks(sequence.tenant) + num_blocks > share * view.blocks_total

    def _peak_fits(self, view: BatchView, joining: Sequence) -> bool:
        """Whether the batch with the newcomer will find its blocks at its predicted peak (Past-Future, 2507.10150): when
        one of the sequences ends, those that last longer have grown as much as it, and those before it are gone."""
        total = self._overcommit * view.blocks_total * self.context.block_size
        batch = [(s.predicted_output - s.num_output, len(s.tokens)) for s in view.running]
        batch.append((joining.predicted_output - joining.num_output, len(joining.tokens)))
        batch.sort(reverse=True)
        held = 0
        for position, (left, num_tokens) in enumerate(batch, start=1):
            held += num_tokens
            if held + max(1.0, left) * position > total:
                self._peak_held_back = True
                return position == 1
        return True

    def _longest_step_s(self) -> float:
        return min(self.tuning.longest_step_s, self.tuning.ttft_part_of_step * self._ttft_s)

    def _reckon_with(self, service: ServiceClass) -> None:
        self._pace_s = min(self._pace_s, service.tpot_s or math.inf)
        self._ttft_s = min(self._ttft_s, service.ttft_s or math.inf)

    def _refresh(self, now_s: float) -> None:
        """Once a second: which classes there are of late, and what a token costs."""
        self._refresh_at_s = now_s + 1.0
        oldest_s = now_s - self.tuning.remembered_s
        self._classes = {name: seen for name, seen in self._classes.items() if seen[0] >= oldest_s}
        self._pace_s = self._ttft_s = math.inf
        for _, service in self._classes.values():
            self._reckon_with(service)
        self._best_rank = min((service.rank for _, service in self._classes.values()), default=0)
        self._token_s = 1 / self._flow.best_per_s


def _turn(level: tuple[int, int]) -> tuple[int, int, int]:
    """When a level's turn is."""
    bucket, rank = level
    return (0, rank, 0) if bucket == AT_RISK else (1, rank, bucket)
