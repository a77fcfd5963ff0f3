"""A step that is split into micro-batches: no token is lost, and each row sees the same context as before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig
from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS
from moiety_engine.messages import CoreSubmit
from moiety_engine.runner.inputs import BatchBuilder, HostBatch
from moiety_engine.runner.micro_batches import cut, cutting_of
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import TwoBatchOverlap
from moiety_wire.messages import Sampling

if TYPE_CHECKING:
    from moiety_engine.distribution.collectives import Ranks

BLOCK_SIZE = 4


def step_of(chunks: list[tuple[int, int]]) -> HostBatch:
    """Return a step of chunks (tokens computed before, tokens of this step), decodes first."""
    made = []
    for key, (before, count) in enumerate(sorted(chunks, key=lambda one: one[1] > 1)):
        prompt = [100 * key + i for i in range(before + count)]
        submit = CoreSubmit(key, "t", STANDARD, prompt, Sampling(), 8, 0, [], 1 << 20, b"s", 0)
        sequence = Sequence(submit, order=key, seed=0)
        sequence.kv.num_computed = before
        sequence.kv.blocks = [10 * key + i for i in range(-(-(before + count) // BLOCK_SIZE))]
        made.append(Chunk(sequence, count, samples=True))
    num_decode = sum(chunk.num_tokens == 1 for chunk in made)
    plan = Plan(made, num_decode, sum(chunk.num_tokens for chunk in made), [])
    return BatchBuilder(BLOCK_SIZE, torch.device("cpu")).arrange(plan)


def seen_by(host: HostBatch) -> list[tuple[int, ...]]:
    """Return for each row its token, position and slot, and the slots that it attends to."""
    rows = []
    for s, context in enumerate(host.context_len_S.tolist()):
        first, end = host.query_start_S1[s : s + 2].tolist()
        for row in range(first, end):
            attended = range(context - (end - row) + 1)
            slots = [host.block_table_SB[s, i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in attended]
            rows.append((int(host.token_ids_T[row]), int(host.positions_T[row]), int(host.slots_T[row]), *slots))
    return rows


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=7), st.integers(2, 5))
@settings(deadline=None)
def test_the_rows_of_micro_batches_are_those_of_the_step_and_attend_to_the_same(
    chunks: list[tuple[int, int]], count: int
) -> None:
    whole = step_of(chunks)
    parts = cut(whole, count)
    assert [row for part in parts for row in seen_by(part)] == seen_by(whole)
    sizes = [len(part.token_ids_T) for part in parts]
    assert len(parts) == count and max(sizes) - min(sizes) <= 1
    for part in parts:
        queries = np.diff(part.query_start_S1)
        assert (queries[: part.num_decode] == 1).all()
        assert part.max_query == max(queries, default=0) and part.max_context == max(part.context_len_S, default=0)
    assert sum(part.num_decode for part in parts) == whole.num_decode


def test_a_step_is_cut_only_where_experts_have_ranks_of_their_own_and_it_has_enough_tokens() -> None:
    together, apart = (
        cutting_of(EngineConfig(model="m", name="n", micro_batches=3, micro_batch_tokens=4), "cpu", one)
        for one in (SINGLE_RANK_GROUPS, cast("Ranks", SimpleNamespace(crossings=("to experts",))))
    )
    few, many = [step_of([(0, 7)]), HostBatch.empty()], [step_of([(0, 1)]), step_of([(0, 9), (3, 2)])]
    assert (together.count(few), together.count(many)) == (1, 1)
    assert (apart.count(few), apart.count(many)) == (1, 2)
    assert apart.count([step_of([(0, 40)])]) == 3
    assert cut(few[0], 1) == []


def test_two_halves_overlap_where_ranks_have_different_tokens_and_a_step_has_enough() -> None:
    def count(device_type: str, hosts: list[HostBatch], **settings: Any) -> int:
        config = EngineConfig(model="m", name="n", **settings)
        return cutting_of(config, device_type, SINGLE_RANK_GROUPS).count(hosts)

    groups = {"dp_attention": 2, "ep": 2}
    decodes, more_decodes = step_of([(4, 1)] * 31), step_of([(4, 1)] * 32)
    prompt, longer_prompt = step_of([(0, 511)]), step_of([(0, 512)])
    found = [
        count("cuda", [one, HostBatch.empty()], **groups) for one in (decodes, more_decodes, prompt, longer_prompt)
    ]
    assert found == [1, 2, 1, 2]
    assert count("cuda", [longer_prompt], **groups, two_batch_overlap=TwoBatchOverlap.OFF) == 1
    assert count("cuda", [longer_prompt], tp=2, ep=2) == 1
    assert count("cpu", [longer_prompt], **groups) == 1
    assert count("cpu", [step_of([(0, 2)])], **groups, two_batch_overlap=TwoBatchOverlap.ON) == 2
    assert count("cpu", [step_of([(0, 1)])], **groups, two_batch_overlap=TwoBatchOverlap.ON) == 1
