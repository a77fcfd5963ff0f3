"""Ranks that have copies of one KV cache and divide the tokens of each step give the answers of a single rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.distribution.layout import Layout, RankPosition, layout_of
from moiety_engine.errors import InvalidConfig
from moiety_engine.images.feature_cache import FeaturePart
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.families import read_spec
from moiety_engine.model.shared_cache import copy_from_first, share_rows
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.runner.block_tables import HostTable
from moiety_engine.runner.image_rows import HostImages
from moiety_engine.runner.inputs import HostBatch
from moiety_engine.runner.token_division import divide_tokens, rank_slots_of
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

from .rank_processes import Alone, RankProcesses, ask_ranks, assert_same, ranks_of, requests, settings_of, thorough

TWO = {"prefill_context_parallel": 2, "ep": 2}
LAYOUTS = [
    ("qwen3_moe", TWO),
    ("gpt_oss", TWO),  # sinks, and a window with block tables of its own, whose blocks are freed
    ("deepseek_v3", {"prefill_context_parallel": 2, "tp": 2, "ep": 4}),
    thorough("mixtral", {"prefill_context_parallel": 4}),  # each expert divided among all ranks
    thorough("deepseek_v3", TWO),
    thorough("qwen3_moe", TWO | {"expert_all2all": "torch-padded"}),
    ("mixtral", TWO | {"ffn_ranks": 2, "micro_batch_tokens": 2}),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_ranks_that_divide_the_tokens_of_a_step_answer_as_one_rank(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any]
) -> None:
    ours = ask_ranks(processes, alone, family, layout)
    assert ours["num_recomputed"] > 0, "requests must be preempted and computed again"


def test_blocks_swap_to_the_host_and_back_on_each_rank_with_a_copy(processes: RankProcesses, alone: Alone) -> None:
    config = settings_of(alone.folders["qwen3_moe"], **TWO, host_kv_memory_bytes=1 << 20)
    ours, *_ = processes.work(*ranks_of(config), waves=requests(), hurries=0.01)
    assert_same(alone.says("qwen3_moe"), ours)
    assert ours["num_swapped"] > 0


def test_a_long_prompt_is_computed_in_chunks_that_span_the_ranks(processes: RankProcesses, alone: Alone) -> None:
    folder, prompt = alone.folders["qwen3_moe"], [3 + (i * 17) % 380 for i in range(150)]
    greedy = Sampling(temperature=0.0, num_logprobs=2)
    waves = [[CoreSubmit(1, "t", STANDARD, prompt, greedy, 8, 0, [], 8, b"s", 0)]]
    ample = {"kv_memory_bytes": 1 << 20}
    (expected,) = processes.work((msgspec.structs.replace(settings_of(folder), **ample), None), waves=waves)
    ours, *_ = processes.work(*ranks_of(msgspec.structs.replace(settings_of(folder, **TWO), **ample)), waves=waves)
    assert_same(expected, ours)


class TwoRanks:
    """The collectives of one of two ranks, each in a thread of its own."""

    size = 2

    def __init__(self, rank: int, given: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self._given, self._barrier = rank, given, barrier

    def all_gather_rows(self, x_LC: torch.Tensor, num_rows: list[int]) -> list[torch.Tensor]:
        assert len(x_LC) == num_rows[self.rank]
        self._given[self.rank] = x_LC
        self._barrier.wait(60)
        return self._given

    def broadcast_first(self, x_LC: torch.Tensor) -> torch.Tensor:
        self._given[self.rank] = x_LC
        self._barrier.wait(60)
        return self._given[0]


def cache_of(kind: str) -> LayerCache | LatentCache:
    """Return an empty cache of 4 blocks of 4 tokens."""
    if kind == "latent":
        return LatentCache(torch.zeros(4, 4, 12), 8)
    parts = torch.zeros(2, 4, 3, 4, 8, dtype=torch.int8 if kind == "int8" else torch.bfloat16)
    scales = torch.zeros(2, 4, 3, 4) if kind == "int8" else (None, None)
    return LayerCache(parts[0], parts[1], scales[0], scales[1])


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "latent"])
@pytest.mark.parametrize("second", [[0, 7, 14], []], ids=["three tokens", "no token"])
def test_both_ranks_have_the_rows_of_both_in_a_cache_of_any_kind(kind: str, second: list[int]) -> None:
    slots, generator = (torch.tensor([1, 6]), torch.tensor(second, dtype=torch.int64)), torch.Generator().manual_seed(0)
    caches, whole = [cache_of(kind), cache_of(kind)], cache_of(kind)
    for cache, slots_T in zip(caches, slots, strict=True):
        for part, whole_part in zip(cache.parts, whole.parts, strict=True):
            by_token, expected = (one.movedim(1 if kind == "latent" else 2, 1) for one in (part, whole_part))
            values = torch.randint(1, 100, (len(slots_T), *by_token.shape[2:]), generator=generator).to(part.dtype)
            by_token[slots_T // 4, slots_T % 4] = values
            expected[slots_T // 4, slots_T % 4] = values
    given: list[torch.Tensor] = [torch.empty(0)] * 2
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [cast(Any, TwoRanks(rank, given, barrier)) for rank in range(2)]
        for done in [pool.submit(share_rows, rank, cache, slots) for rank, cache in zip(ranks, caches, strict=True)]:
            done.result()
    for cache in caches:
        for part, expected in zip(cache.parts, whole.parts, strict=True):
            assert torch.equal(part, expected) and part.any()


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "latent"])
@pytest.mark.parametrize("slots", [[1, 2, 3, 8, 9], []], ids=["five tokens", "no token"])
def test_the_second_rank_gets_the_rows_that_the_first_has_loaded(kind: str, slots: list[int]) -> None:
    first, second, slots_T = cache_of(kind), cache_of(kind), torch.tensor(slots, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for part in first.parts:
        part.copy_(torch.randint(1, 100, part.shape, generator=generator))
    loaded = [part.clone() for part in first.parts]
    given: list[torch.Tensor] = [torch.empty(0)] * 2
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        ranks = [cast(Any, TwoRanks(rank, given, barrier)) for rank in range(2)]
        runs = [
            pool.submit(copy_from_first, rank, cache, slots_T)
            for rank, cache in zip(ranks, (first, second), strict=True)
        ]
        for run in runs:
            run.result()
    for before, own, other in zip(loaded, first.parts, second.parts, strict=True):
        assert torch.equal(own, before)
        own_T, other_T = (one.movedim(1 if kind == "latent" else 2, 1).flatten(0, 1) for one in (own, other))
        is_copied_T = torch.isin(torch.arange(len(own_T)), slots_T)
        assert torch.equal(other_T[is_copied_T], own_T[is_copied_T])
        assert not other_T[~is_copied_T].any()


def host_of(lengths: list[int], num_decode: int, wanted: list[int], num_scored: int, pending: list[int]) -> HostBatch:
    """Return a step with parts of these lengths, whose slots are the numbers of its rows."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    rows = np.arange(starts[-1])
    table = np.zeros((len(lengths), 1), dtype=np.int32)
    return HostBatch(
        token_ids_T=rows,
        positions_T=rows,
        slots_T=rows,
        owner_T=rows,
        query_start_S1=starts,
        context_len_S=np.array(lengths, dtype=np.int32),
        block_table_SB=table,
        wanted_rows_L=np.array(wanted, dtype=np.int64),
        num_scored=num_scored,
        pending_rows_P=np.array(pending, dtype=np.int64),
        sampled_rows_P=np.arange(len(pending)),
        num_decode=num_decode,
        max_context=max(lengths),
        max_query=max(lengths),
        further_tables=(HostTable(rows + 1000, table),),
    )


@given(st.data())
def test_a_division_has_each_row_once_and_the_wanted_rows_in_their_order(data: st.DataObject) -> None:
    num_decode, num_ranks = data.draw(st.integers(0, 3)), data.draw(st.integers(2, 5))
    lengths = [1] * num_decode + data.draw(st.lists(st.integers(1, 9), min_size=num_decode == 0, max_size=4))
    rows = st.lists(st.integers(0, sum(lengths) - 1), unique=True, max_size=6)
    wanted, pending = data.draw(rows), sorted(data.draw(rows))
    num_scored = data.draw(st.integers(0, len(wanted)))
    host = host_of(lengths, num_decode, wanted, num_scored, pending)
    parts, order = divide_tokens(host, num_ranks)
    assert np.concatenate([part.token_ids_T for part in parts]).tolist() == list(range(sum(lengths)))
    sizes = [len(part.token_ids_T) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    found = np.concatenate([part.token_ids_T[part.wanted_rows_L] for part in parts])
    assert found[order].tolist() == wanted
    assert sum(part.num_scored for part in parts) == num_scored
    taken = [(part.token_ids_T[part.pending_rows_P].tolist(), part.sampled_rows_P.tolist()) for part in parts]
    assert [row for one, _ in taken for row in one] == pending
    assert [row for _, one in taken for row in one] == list(range(len(pending)))
    first, second = rank_slots_of(parts)
    assert np.concatenate(first).tolist() == list(range(sum(lengths)))
    assert np.concatenate(second).tolist() == [1000 + row for row in range(sum(lengths))]


@given(st.data())
def test_a_division_has_each_row_of_an_image_with_its_feature(data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=4))
    rows, parts = list[int](), list[FeaturePart]()
    for number, (gap, num_tokens) in enumerate(gaps):
        start = (rows[-1] + 1 if rows else 0) + gap
        rows += range(start, start + num_tokens)
        parts.append(FeaturePart(bytes([number]), 10 * number, num_tokens))
    images = HostImages(np.array(rows), np.tile(rows, (3, 1)), tuple(parts))
    length = rows[-1] + 1 + data.draw(st.integers(0, 3))
    host = msgspec.structs.replace(host_of([length], 0, [], 0, []), images=images)

    def features(one: HostImages | None) -> list[tuple[bytes, int]]:
        return [] if one is None else [(key, first + i) for key, first, count in one.parts for i in range(count)]

    divided, _ = divide_tokens(host, data.draw(st.integers(2, 5)))
    assert [name for part in divided for name in features(part.images)] == features(images)
    found = [(part.token_ids_T, part.images) for part in divided if part.images is not None]
    assert [row for tokens_T, of_part in found for row in tokens_T[of_part.rows_I]] == rows
    assert [row for _, of_part in found for row in of_part.positions_3I[1]] == rows


REFUSED = [
    ({"dp_attention": 2}, "--dp-attention"),
    ({"tp": 2, "decode_context_parallel": 2}, "--decode-context-parallel"),
    ({"pp": 2}, "--pp"),
    ({"batch_invariant": True, "tp": 2}, "--batch-invariant is not available with --tp"),
    ({"speculate": Speculate.MTP}, "--speculate mtp"),
    ({"ep": 3}, "--ep 3 does not divide the 2 ranks of --prefill-context-parallel 2"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_settings_that_do_not_divide_tokens_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        layout_of(EngineConfig(model="folder", name="name", prefill_context_parallel=2, **settings))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_next", "recurrent layers"),
        ("deepseek_v32", "selects or compresses positions"),
        ("deepseek_v4", "selects or compresses positions|recurrent layers"),
        ("jetmoe", "selects or compresses positions"),
        ("longcat_flash", "experts run beside the next attention"),
    ],
)
def test_models_whose_tokens_cannot_be_divided_are_refused(folders: dict[str, Path], family: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        own_spec(read_spec(folders[family]), RankPosition(Layout(dp=2, pcp=2)))
