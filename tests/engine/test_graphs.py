"""Decode steps that CUDA graphs replay.

The input of a graph, a batch with padding rows, is run here without a graph. Tests on a GPU check that a replay gives
the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import KvCache
from moiety_engine.offline import run_all
from moiety_engine.runner.graphs import graph_contexts, graph_sizes, padded
from moiety_engine.runner.inputs import BatchBuilder, HostBatch
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

BLOCK_SIZE = 4
NUM_BLOCKS = 24
SCRATCH = NUM_BLOCKS  # the block beyond those that sequences use


def make_submit(key: int, length: int, **sampling: Any) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 300 for i in range(length)]
    drawn = Sampling(**({"temperature": 0.0} | sampling))
    return CoreSubmit(key, "t", STANDARD, prompt, drawn, 24, 0, [], 24, b"s", 0)


def prefilled(model: Any, lengths: list[int]) -> tuple[KvCache, BatchBuilder, Plan]:
    """Return sequences of these lengths, computed except for one token each, and the plan that decodes it."""
    kv = model.allocate_kv(NUM_BLOCKS + 1, BLOCK_SIZE)
    for layer in kv.layers:
        layer.k_NGPd.fill_(torch.nan)
        layer.v_NGPd.fill_(torch.nan)
    builder = BatchBuilder(BLOCK_SIZE, model.device)
    free = list(reversed(range(NUM_BLOCKS)))
    sequences = []
    for key, length in enumerate(lengths):
        sequence = Sequence(make_submit(key, length), order=key, seed=0)
        sequence.kv.blocks = [free.pop() for _ in range(-(-(length + 1) // BLOCK_SIZE))]
        sequences.append(sequence)
    model.hidden(builder.build(Plan([Chunk(s, len(s.tokens), samples=True) for s in sequences], 0, 99, [])), kv)
    for sequence in sequences:
        sequence.kv.num_computed = len(sequence.tokens)
        sequence.tokens.append(5 + sequence.request.order)
    chunks = [Chunk(s, 1, samples=True) for s in sequences]
    return kv, builder, Plan(chunks, len(chunks), len(chunks), [])


@pytest.mark.parametrize("size", [3, 4, 8])
def test_rows_that_belong_to_nobody_change_no_result_and_touch_nobodys_memory(loops: Any, size: int) -> None:
    model = loops.model
    results = []
    for more in (0, size - 3):
        kv, builder, plan = prefilled(model, [9, 4, 17])
        host = builder.arrange(plan)
        host = padded(host, 3 + more, SCRATCH, BLOCK_SIZE) if more else host
        hidden_LD = model.hidden(builder.upload(host), kv).clone()
        of_others = [part[:NUM_BLOCKS] for layer in kv.layers for part in (layer.k_NGPd, layer.v_NGPd)]
        results.append((hidden_LD, of_others))
    (plain_LD, plain_kv), (padded_LD, padded_kv) = results
    assert torch.equal(plain_LD, padded_LD)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(plain_kv, padded_kv, strict=True))


@given(max_running=st.integers(1, 700), num_decode=st.integers(1, 700))
def test_every_number_of_decodes_up_to_the_largest_batch_has_a_graph_that_pads_it_little(
    max_running: int, num_decode: int
) -> None:
    sizes = graph_sizes(max_running)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_running
    if num_decode <= max_running:
        size = next(size for size in sizes if size >= num_decode)
        assert size - num_decode <= max(7, num_decode // 2)


def test_graphs_are_made_for_the_longest_context_and_for_a_short_one() -> None:
    assert graph_contexts(131072) == [4096, 131072]
    assert graph_contexts(512) == [512]


def test_a_padded_batch_says_of_every_row_where_it_reads_and_writes(loops: Any) -> None:
    _, builder, plan = prefilled(loops.model, [9, 4, 17])
    host: HostBatch = padded(builder.arrange(plan), 8, SCRATCH, BLOCK_SIZE)
    assert set(host.slots_T[3:].tolist()) == {SCRATCH * BLOCK_SIZE}
    assert set(host.block_table_SB[3:, 0].tolist()) == {SCRATCH}
    assert host.context_len_S[3:].tolist() == [1] * 5
    assert host.query_start_S1.tolist() == list(range(9))
    assert host.wanted_rows_L.tolist() == [0, 1, 2]
    assert host.adapter_T is None  # padding rows have no adapter, and steps with adapters are not replayed
    every = [getattr(host, name) for name in host.__struct_fields__ if name.endswith("_T")]
    lengths = {len(values) for values in every if values is not None}
    assert lengths == {8}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_replayed_steps_give_the_bits_of_launched_ones_with_overlap_and_without(checkpoint: Path) -> None:
    answers = []  # of as many requests of one length as a graph has rows: none is padded, which alone changes no bits
    submits = [make_submit(key, 7) for key in range(4)]
    submits += [make_submit(key, 7, temperature=0.9, seed=key) for key in range(4, 8)]
    for graphs in (False, True):
        for overlap in (Overlap.OFF, Overlap.ON):
            loop = load_loop(
                EngineConfig(
                    model=str(checkpoint), name="t", device="cuda", dtype="bfloat16", max_running=8,
                    max_batch_tokens=64, kv_memory_bytes=64 << 20, cuda_graphs=graphs, overlap=overlap,
                )
            )  # fmt: skip
            loop.warm_up()
            assert loop.executor.replays is graphs
            answers.append({key: result.token_ids for key, result in run_all(loop, submits).items()})
    assert answers[1:] == answers[:-1]
    assert all(len(tokens) == 24 for tokens in answers[0].values())


def test_only_a_step_whose_rows_all_decode_and_are_all_wanted_is_replayed(loops: Any) -> None:
    _, builder, plan = prefilled(loops.model, [9, 4, 17])
    assert builder.arrange(plan).decodes_only
    first, *others = plan.chunks
    padding_row = Chunk(first.sequence, 0, samples=False, num_pad=1)  # of the padded strategy
    assert not builder.arrange(Plan([padding_row, *others], 3, 3, [])).decodes_only
    assert not builder.arrange(Plan(plan.chunks, 2, 3, [])).decodes_only  # the last one is a prompt's last token


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_step_waits_for_the_device(checkpoint: Path) -> None:
    loop = load_loop(
        EngineConfig(model=str(checkpoint), name="t", device="cuda", dtype="bfloat16", kv_memory_bytes=64 << 20)
    )
    loop.warm_up()
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9}, {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5}, {"num_logprobs": 3}, {"logit_bias": {7: 2.0}},
    ]  # fmt: skip
    submits = [make_submit(key, 6 + key, **kind) for key, kind in enumerate(kinds)]
    run_all(loop, submits)  # what is made once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run_all(loop, submits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(len(result.token_ids) == 24 for result in results.values())
