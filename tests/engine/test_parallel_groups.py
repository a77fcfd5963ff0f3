"""Rank groups with data-parallel attention: the assignment of requests to groups, and of rows to requests."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.messages import CoreSubmit
from moiety_engine.runner.group_results import order_of
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.scheduling.admission.batching_strategies import STRATEGIES
from moiety_engine.scheduling.kv.kv_groups import GroupCandidate, best_group
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.limits import SchedulerLimits
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.scheduling.scheduler import Scheduler
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling
from moiety_wire.roles import transfer_group

BLOCK_SIZE, BUDGET = 4, 64


def submit_of(key: int, prompt: list[int], *, embed: bool = False, scored: bool = False) -> CoreSubmit:
    sampling = Sampling(num_prompt_logprobs=1 if scored else None)
    return CoreSubmit(key, "t", STANDARD, prompt, sampling, 8, 0, [], 1 << 20, b"s", 0, embed=embed)


class Replica:
    """A scheduler of two groups, and a model that says 100 + the position."""

    def __init__(self, num_blocks: int = 64) -> None:
        first, second = (KvLedger(BlockPool(num_blocks), BLOCK_SIZE, prefix_caching=True) for _ in range(2))
        limits = SchedulerLimits(BUDGET, 16)
        self.scheduler = Scheduler(first, limits, STRATEGIES[Batching.CONTINUOUS], further=[second])
        self._now_ns = 10**12
        self.loaded: dict[int, int] = {}  # group into whose blocks the KV of each request was loaded

    def add(self, key: int, prompt: list[int]) -> None:
        self.scheduler.add(submit_of(key, prompt), seed=0, now_ns=self._now_ns)

    def take_over(self, key: int, prompt: list[int], transfer_id: str) -> None:
        """Add a request whose prompt another engine has computed, and whose KV is here."""
        submit = msgspec.structs.replace(submit_of(key, prompt), transfer_id=transfer_id, resumed_ids=[99])
        self.scheduler.add(submit, seed=0, now_ns=self._now_ns, num_transferred_tokens=len(prompt))

    def step(self) -> dict[int, tuple[int, int]]:
        """Run a step; return (group, tokens) of each of its requests."""
        self._now_ns += 10**7
        plan = self.scheduler.plan(self._now_ns)
        keys = {chunk.sequence.key: chunk.sequence.kv.group for chunk in plan.chunks}
        self.loaded |= {kv_load.key: keys[kv_load.key] for kv_load in plan.kv_loads}
        found = {chunk.sequence.key: (chunk.sequence.kv.group, chunk.num_tokens) for chunk in plan.chunks}
        tokens = [100 + len(chunk.sequence.tokens) for chunk in plan.chunks if chunk.samples]
        self.scheduler.commit(plan, tokens, [None] * len(tokens), self._now_ns)
        return found

    def drain(self) -> dict[int, int]:
        """Run steps until no request is open; return the group of each."""
        groups: dict[int, int] = {}
        while not self.scheduler.idle:
            groups |= {key: group for key, (group, _) in self.step().items()}
        return groups


def test_prompts_that_come_together_are_shared_among_the_groups_and_so_are_a_steps_rows() -> None:
    replica = Replica()
    for key in range(4):
        replica.add(key, [1000 * key + i for i in range(40)])
    step = replica.step()
    for group in (0, 1):
        assert sum(tokens for of, tokens in step.values() if of == group) == BUDGET // 2
    groups = replica.drain()
    assert sorted(groups.values()) == [0, 0, 1, 1]


def test_the_next_turn_of_a_conversation_goes_to_the_group_that_has_the_first() -> None:
    replica = Replica()
    talks = {key: [1000 * key + i for i in range(20)] for key in range(4)}
    for key, prompt in talks.items():
        replica.add(key, prompt)
    groups = replica.drain()
    for key, prompt in reversed(talks.items()):
        replica.add(10 + key, [*prompt, 7, 7, 7])
    again = replica.drain()
    assert again == {10 + key: group for key, group in groups.items()}
    assert replica.scheduler.cached_tokens_total == len(talks) * 20


def test_a_request_continues_in_the_group_that_has_received_its_kv() -> None:
    replica = Replica(num_blocks=24)
    names = [f"{number:032x}" for number in range(200)]
    in_second = [name for name in names if transfer_group(name, 2) == 1][:6]
    for key, name in enumerate(in_second):  # more than the second group has room for at once
        replica.take_over(key, [1000 * key + i for i in range(20)], name)
    replica.add(10, list(range(50, 70)))
    assert replica.drain()[10] == 0
    assert replica.loaded == dict.fromkeys(range(6), 1)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 40), st.integers(-5, 50)), min_size=1, max_size=6))
def test_a_group_with_the_beginning_is_taken_if_it_has_room_and_not_much_more_to_do(
    groups: list[tuple[int, int, int]],
) -> None:
    candidates = [GroupCandidate(group, *one) for group, one in enumerate(groups)]
    chosen = candidates[best_group(candidates, 40)]
    fitting = [one for one in candidates if one.blocks_left >= 0]
    assert chosen.blocks_left >= 0 or not fitting
    least = min(one.load_tokens for one in fitting or candidates)
    assert chosen.load_tokens <= 1.25 * least + 40
    better = [one for one in fitting if one.cached_tokens > chosen.cached_tokens]
    assert all(one.load_tokens > 1.25 * least + 40 for one in better)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from(["samples", "embeds", "scored", "nothing"])),
        min_size=1,
        max_size=8,
    )
)
@settings(deadline=None)
def test_rows_of_all_groups_come_in_the_order_that_one_group_would_have(parts: list[tuple[int, int, str]]) -> None:
    chunks = []
    for key, (group, length, what) in enumerate(parts):
        prompt = [100 * key + i for i in range(length + 1)]
        sequence = Sequence(submit_of(key, prompt, scored=what == "scored"), order=key, seed=0)
        sequence.kv.blocks, sequence.kv.group = [2 * key, 2 * key + 1], group
        chunks.append(Chunk(sequence, length, what == "samples", embeds=what == "embeds"))
    plan = Plan(chunks, 0, sum(chunk.num_tokens for chunk in chunks), [])
    builder = BatchBuilder(BLOCK_SIZE, torch.device("cpu"))
    hosts = builder.arrange_groups(plan, 3)
    assert [len(host.token_ids_T) for host in hosts] == [
        sum(length for group, length, _ in parts if group == one) for one in range(3)
    ]
    of_groups = np.concatenate([host.token_ids_T[host.wanted_rows_L] for host in hosts])
    whole = builder.arrange(plan)
    assert of_groups[order_of(plan, hosts)].tolist() == whole.token_ids_T[whole.wanted_rows_L].tolist()
