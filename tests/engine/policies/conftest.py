"""A small replica for tests of policies: the real scheduler and block pool, and a stand-in for the model."""

from __future__ import annotations

import pytest
from tests.core_submits import core_submit

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.messages import CoreFinish, CoreOutput
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.scheduling.step_time.step_time_model import StepTimeModel
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD, ServiceClass
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import FinishReason, Sampling
from moiety_wire.trace_events import EventKind

BLOCK_SIZE = 4
EOS = 7
SECOND = 10**9
TOKEN_S = 0.001
STEP_S = 0.01


class Replica:
    """A scheduler, a clock, and a model that returns 100 + position until a request has as many tokens as it asked
    for."""

    def __init__(
        self,
        policy: str,
        *,
        num_blocks: int = 1024,
        budget: int = 32,
        max_running: int = 8,
        max_waiting: int = 1 << 15,
        caching: bool = True,
        step_s: float = STEP_S,
        batches_experts: bool = False,
    ) -> None:
        ledger = KvLedger(BlockPool(num_blocks), BLOCK_SIZE, prefix_caching=caching)
        limits = SchedulerLimits(budget, max_running, max_waiting=max_waiting, batches_experts=batches_experts)
        right = (step_s, 100 * TOKEN_S, *[0.0] * 5)  # the step-time model: a constant, and a time per row
        strategy = STRATEGIES[Batching.CONTINUOUS]
        self.scheduler = Scheduler(ledger, limits, strategy, policy, step_time=StepTimeModel(right))
        self.step_s = step_s
        self.now_ns = 1000 * SECOND
        self.wanted: dict[int, int] = {}
        self.credit: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        self.came_ns: dict[int, list[int]] = {}
        self.finishes: dict[int, CoreFinish] = {}
        self.started: list[int] = []  # in the order in which they first ran
        self.prefills: list[list[int]] = []  # of each step, whose prompts it computed
        self.prefill_rows: list[int] = []
        self.refused: set[int] = set()

    def add(
        self,
        prompt: list[int] | int,
        *,
        tenant: str = "t",
        service: ServiceClass = STANDARD,
        output: int = 1,
        weight: float = 1.0,
        credit: int = 1 << 30,
    ) -> int:
        """Add a request. A prompt that is given as a length shares no prefix with another one."""
        key = len(self.wanted)
        self.wanted[key], self.outputs[key], self.came_ns[key] = output, [], []
        self.credit[key] = credit
        submit = core_submit(
            key,
            [-key - 1] * prompt if isinstance(prompt, int) else prompt,
            max(output, 40),
            tenant_id=tenant,
            service=service,
            sampling=Sampling(),
            stop_token_ids=[EOS],
            credit_tokens=credit,
            cache_salt=b"",
            arrival_unix_ns=self.now_ns,
            tenant_weight=weight,
        )
        self.scheduler.add(submit, seed=0, now_ns=self.now_ns)
        self.refused.update(failure.key for failure in self.scheduler.take_verdicts()[1])
        return key

    def extend(self, key: int, credit: int) -> None:
        self.credit[key] = max(self.credit[key], credit)
        self._take(self.scheduler.extend(key, credit, last=False, now_ns=self.now_ns))

    def abort(self, key: int) -> None:
        self._take(self.scheduler.abort(key, FinishReason.ABORT, now_ns=self.now_ns))

    def wait(self, seconds: float) -> None:
        self.now_ns += round(seconds * SECOND)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now_ns)
        assert plan.num_rows <= self.scheduler.limits.max_batch_tokens
        if not plan.chunks:
            assert not [s for s in self.scheduler.queues.by_key.values() if s.has_credit], "somebody is left waiting"
        tokens = []
        prefills = plan.chunks[plan.num_decode :]
        self.prefills.append([chunk.sequence.key for chunk in prefills])
        self.prefill_rows.append(sum(chunk.num_tokens for chunk in prefills))
        for chunk in plan.chunks:
            key = chunk.sequence.key
            if key not in self.started:
                self.started.append(key)
            if chunk.samples:
                position = chunk.sequence.num_output
                tokens.append(EOS if position + 1 == self.wanted[key] else 100 + position)
        self.now_ns += round((self.step_s + TOKEN_S * plan.num_rows) * SECOND)
        for output in self.scheduler.commit(plan, tokens, [None] * len(tokens), self.now_ns):
            self._take(output)
        held = [block for s in self.scheduler.queues.by_key.values() for block in s.kv.blocks]
        assert self.scheduler.kv.pool.num_used == len(set(held))

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if self.scheduler.idle:
                assert self.scheduler.kv.pool.num_used == 0
                assert self.scheduler.policy.num_queued == 0
                assert not self.kept_sequences(), "the policy keeps records of requests that have ended"
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def kept_sequences(self) -> list[Sequence]:
        """Return the sequences of which the policy keeps a record."""
        found = vars(self.scheduler.policy).values()
        records = (value for value in found if isinstance(value, dict | set))
        return [sequence for value in records for sequence in value if isinstance(sequence, Sequence)]

    def events(self, key: int) -> list[EventKind]:
        return [event.kind for event in self.finishes[key].events]

    def _take(self, output: CoreOutput | None) -> None:
        if output is None:
            return
        self.outputs[output.key] += output.token_ids
        self.came_ns[output.key] += [self.now_ns] * len(output.token_ids)
        assert len(self.outputs[output.key]) <= self.credit[output.key]
        if output.finish is not None:
            assert output.key not in self.finishes
            self.finishes[output.key] = output.finish


@pytest.fixture(scope="session")
def make_replica() -> type[Replica]:
    return Replica
