"""Rank groups whose sequences hold all of their blocks: no group waits for another one's work."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.config import PolicyName
from moiety_engine.messages import CoreSubmit
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling

BLOCK_SIZE, NUM_BLOCKS, STEPS = 4, 26, 330
MAX_TOKENS = NUM_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize("policy", [PolicyName.MOIETY, PolicyName.FCFS])
@pytest.mark.parametrize(
    ("lengths", "budget", "comes_at"),
    [((49, 46, 50), 6, 6), ((41, 58, 31), 8, 11), ((17, 68, 72), 12, 11), ((29, 47, 69), 6, 27)],
)
def test_a_group_that_has_run_full_goes_on_while_others_are_kept_busy(
    policy: PolicyName, lengths: tuple[int, int, int], budget: int, comes_at: int
) -> None:
    """A prompt that is computed in pieces and an answer beside it have taken all blocks between them, and need more."""
    first, *further = [KvLedger(BlockPool(NUM_BLOCKS), BLOCK_SIZE, prefix_caching=True) for _ in range(2)]
    scheduler = Scheduler(first, SchedulerLimits(budget, 16), STRATEGIES[Batching.CONTINUOUS], policy, further=further)
    now_ns = 10**12
    waited: dict[Any, Any] = {}

    def add(key: int, num_prompt: int, num_output: int) -> None:
        prompt = [key * 1000 + place for place in range(num_prompt)]
        submit = CoreSubmit(key, "t", STANDARD, prompt, Sampling(), num_output, 0, [], 1 << 20, b"s", 0)
        scheduler.add(submit, seed=0, now_ns=now_ns)

    decoding, prompt, other = lengths
    add(1, decoding, 100 - decoding)
    add(2, other, 100 - other)
    longest = 0
    for step in range(STEPS):
        if step == comes_at:
            add(3, prompt, 4)
        if step >= comes_at and step % 6 == 0 and scheduler.num_waiting < 2:
            add(100 + step, 8, 20)
        now_ns += 10**7
        plan = scheduler.plan(now_ns)
        at_work = {chunk.sequence.key for chunk in plan.chunks}
        waited = {one.key: 0 if one.key in at_work else waited.get(one.key, 0) + 1 for one in scheduler.queues.running}
        longest = max([longest, *waited.values()])
        tokens = [100 + len(chunk.sequence.tokens) for chunk in plan.chunks if chunk.samples]
        scheduler.commit(plan, tokens, [None] * len(tokens), now_ns)
    assert longest < 100
