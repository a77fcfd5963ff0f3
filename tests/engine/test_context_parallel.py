"""Ranks that divide the positions of the KV cache, in real processes on gloo, give the answers of a single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moiety_engine.config import EngineConfig
from moiety_engine.distribution.layout import Layout, RankPosition, layout_of
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.batch import Batch, GroupTable
from moiety_engine.model.families import read_spec
from moiety_engine.model.tensor_shards import own_spec
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

from .rank_processes import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Alone,
    RankProcesses,
    ask_ranks,
    assert_same,
    ranks_of,
    requests,
    settings_of,
    thorough,
)

TWO, OF_FOUR, FOUR = ({"tp": tp, "decode_context_parallel": dcp} for tp, dcp in ((2, 2), (4, 2), (4, 4)))
LAYOUTS = [
    ("deepseek_v3", TWO),  # latent rows, which all ranks of --tp hold
    ("qwen3_moe", OF_FOUR),  # two key-value heads on four ranks
    ("gpt_oss", OF_FOUR),  # sinks, and a window whose blocks are freed
    ("deepseek_v3", FOUR | {"ep": 2}),
    thorough("kimi_linear", TWO),  # latent rows beside recurrent states
    thorough("mixtral", OF_FOUR | {"ep": 4}),
    thorough("longcat_flash", TWO | {"ep": 2}),
    thorough("deepseek_v3", TWO | {"pp": 2}),
    ("deepseek_v3", TWO | {"dp_attention": 2, "ep": 4, "two_batch_overlap": "on"}),
]
RECURRENT = ("kimi_linear",)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_ranks_with_a_part_of_the_positions_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any]
) -> None:
    ours = ask_ranks(processes, alone, family, layout)
    assert ours["num_cached"] > 0, "a prefix is found, as block tables do not know of the ranks"
    assert family in RECURRENT or ours["num_recomputed"] > 0, "memory was so tight that requests were preempted"


def long_request(num_prompt: int, key: int = 1) -> CoreSubmit:
    prompt = [3 + (i * i + 11 * key) % 380 for i in range(num_prompt)]
    return CoreSubmit(key, "t", STANDARD, prompt, Sampling(temperature=0.0, num_logprobs=2), 8, 0, [], 8, b"s", 0)


LONG = [
    ("deepseek_v3", {}, TWO),
    ("deepseek_v3", {"tp": 2}, TWO),
    thorough("mixtral", {"tp": 4}, OF_FOUR),
]


@pytest.mark.parametrize(("family", "plain", "divided"), LONG, ids=str)
def test_a_prompt_that_the_cache_of_a_rank_refuses_is_served_by_ranks_that_divide_it(
    processes: RankProcesses, alone: Alone, family: str, plain: dict[str, Any], divided: dict[str, Any]
) -> None:
    folder, room = alone.folders[family], NUM_BLOCKS * BLOCK_SIZE
    config, waves = settings_of(folder, **plain), [[long_request(2 * room - 16)]]
    refused, *_ = processes.work(*ranks_of(config), waves=waves, some_fail=True)
    assert f"1 to {room - 1}" in refused["reasons"]["1"] and not refused["token_ids"]["1"]
    one_rank = settings_of(folder)
    ample = msgspec.structs.replace(one_rank, kv_memory_bytes=4 * (one_rank.kv_memory_bytes or 0))
    (expected,) = processes.work((ample, None), waves=waves)
    same = {"kv_memory_bytes": config.kv_memory_bytes}  # of each rank
    ours, *_ = processes.work(*ranks_of(msgspec.structs.replace(settings_of(folder, **divided), **same)), waves=waves)
    assert_same(expected, ours)
    assert len(ours["token_ids"]["1"]) == 8


@pytest.mark.parametrize("family", ["deepseek_v3"])
def test_a_row_has_the_same_bits_in_any_batch_of_ranks_with_a_part_of_the_positions(
    processes: RankProcesses, alone: Alone, family: str
) -> None:
    config = settings_of(alone.folders[family], **TWO, batch_invariant=True)
    config = msgspec.structs.replace(config, kv_memory_bytes=1 << 20)
    together = [long_request(70 + 9 * key, key) for key in range(4)]
    by_itself = [[msgspec.structs.replace(one, key=100 + one.key)] for one in together]
    ours, *_ = processes.work(*ranks_of(config), waves=[together, *by_itself])
    assert not ours["error"]
    for one in together:
        beside, alone_ = str(one.key), str(100 + one.key)
        assert ours["token_ids"][beside] == ours["token_ids"][alone_]
        assert ours["best"][beside] == ours["best"][alone_]


def test_blocks_swap_to_the_host_and_back_on_each_rank(processes: RankProcesses, alone: Alone) -> None:
    expected = alone.says("deepseek_v3")
    config = settings_of(alone.folders["deepseek_v3"], **TWO, host_kv_memory_bytes=1 << 20)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), hurries=0.01)
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    assert ours["num_swapped"] > 0


def test_a_rank_has_the_slots_of_its_positions_only() -> None:
    slots, none = torch.tensor([0, 1, 2, 3, 21, 22, -1]), torch.zeros(0, dtype=torch.int64)
    one, table = torch.tensor([0, 7], dtype=torch.int32), torch.zeros(1, 6, dtype=torch.int32)
    further = GroupTable(slots + 4, table)
    batch = Batch(slots, slots, slots, one, one[1:], table, none, 0, 23, 7, further_tables=(further,))
    first, second = (batch.of_shard(2, shard, block_size=4) for shard in range(2))
    assert first.slots_T.tolist() == [0, -1, 1, -1, -1, 11, -1]
    assert second.slots_T.tolist() == [-1, 0, -1, 1, 10, -1, -1]
    assert first.further_tables[0].slots_T.tolist() == [2, -1, 3, -1, -1, 13, -1]
    assert (second.attention.num_shards, second.attention.shard) == (2, 1)
    assert second.attention.context_len_S.tolist() == [7]


REFUSED = [
    ({"tp": 3, "decode_context_parallel": 2}, "does not divide the 3 ranks of --tp"),
    ({"decode_context_parallel": 2}, "does not divide the 1 ranks of --tp"),
    (TWO | {"block_size": 3}, "--block-size 3 cannot be divided"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=str)
def test_settings_that_need_all_positions_on_a_rank_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        layout_of(EngineConfig(model="folder", name="name", **settings))


MODELS = [
    ("qwen3_moe", Layout(tp=2, dcp=2), "there is one of each of the model's 2: use a multiple of 4 as --tp"),
    ("qwen3_moe", Layout(tp=4, dcp=4), "there are 2 of each of the model's 2: use a divisor of 2"),
    ("deepseek_v32", Layout(tp=2, dcp=2), "selects or compresses positions across the whole context"),
    ("deepseek_v4", Layout(tp=2, dcp=2), "selects or compresses positions across the whole context"),
    ("jetmoe", Layout(tp=2, dcp=2), "selects or compresses positions across the whole context"),
]


@pytest.mark.parametrize(("family", "layout", "message"), MODELS, ids=str)
def test_models_whose_positions_cannot_be_divided_are_refused(
    folders: dict[str, Path], family: str, layout: Layout, message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        own_spec(read_spec(folders[family]), RankPosition(layout))
