"""Parallel layouts, in real processes on gloo, give the same answers as a single rank."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.distribution.layout import RankPosition, layout_of
from moiety_engine.model.families import read_spec
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.weight_offload import weight_bytes
from moiety_engine.planning.layout_support import LAYOUTS
from moiety_wire.messages import Sampling

from .rank_processes import FAMILIES, Alone, RankProcesses, assert_same, ranks_of, requests, settings_of, thorough

CUT_BY = {  # layouts, and the family that shows each of them, if no other test does
    ("tp", 2): "deepseek_v3",
    ("tp", 2, "ep", 2): "qwen3_next",
    ("tp", 4, "ep", 4): None,  # shown where ranks share experts
    ("pp", 2): "qwen3_moe",
}
ALSO_SHOWN = {
    ("jamba", ("tp", 2)),  # the ranks add their parts of what time steps are projected from
    ("deepseek_v4", ("tp", 4, "ep", 4)),  # a rank has a group of heads, and all compressed entries
    ("deepseek_v4", ("pp", 2)),  # stages pass on several residual streams
    ("longcat_flash", ("tp", 2, "ep", 2)),  # some experts are on no rank
    ("zaya", ("pp", 2)),  # stages pass on the input of their last router
    ("zaya", ("tp", 2, "ep", 2)),  # a rank has all queries, keys and values, and attends with a part of the heads
    ("minimax", ("tp", 2, "ep", 2)),  # the ranks' heads are normalized together
    ("granitemoehybrid, one group", ("tp", 2)),  # the ranks' heads read and write states by the same vectors
    ("jetmoe", ("tp", 2, "ep", 2)),  # a rank has a part of the query heads of each expert of attention
}
OF_TWO_HEADS = ("qwen3_next", "granitemoehybrid", "kimi_linear", "nemotron_h", "nemotron_h, latent")
RECURRENT = (*OF_TWO_HEADS, "granitemoehybrid, one group", "deepseek_v4", "jamba", "minimax", "zaya")
REFUSED: set[tuple[str, tuple[str | int, ...]]] = {(family, ("tp", 4, "ep", 4)) for family in OF_TWO_HEADS}
CUT = [
    (pytest.param if family == shown_by or (family, cuts) in ALSO_SHOWN else thorough)(
        family, dict(zip(cuts[::2], cuts[1::2], strict=True))
    )
    for cuts, shown_by in CUT_BY.items()
    for family in FAMILIES
    if (family, cuts) not in REFUSED
]


@pytest.mark.parametrize(("family", "layout"), CUT, ids=str)
def test_tensor_and_expert_parallel_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, int]
) -> None:
    expected = alone.says(family)
    ours, *others = processes.work(*ranks_of(settings_of(alone.folders[family], **layout)), waves=requests())
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    assert expected["num_cached"] > 0 and ours["num_cached"] > 0
    assert family in RECURRENT or (expected["num_recomputed"] > 0 and ours["num_recomputed"] > 0)
    num_ranks = len(others) + 1
    # A first stage has the vocabulary, and a layer more; on each rank are whole: an indexer, what pools entries, and
    # ZAYA1's queries, keys and values.
    shares = 1.45 if "pp" in layout or family == "deepseek_v32" else num_ranks / 1.1
    is_partly_whole = family == "deepseek_v4" or (family == "zaya" and "tp" in layout)
    shares = num_ranks / 1.5 if is_partly_whole else shares
    assert ours["weight_bytes"] <= expected["weight_bytes"] / shares


# ranks have copies of layers or of key-value heads, or one rank has the vocabulary
UNEVEN = {"dp_attention", "prefill_context_parallel", "decode_context_parallel", "pp"}
NARROW_SHOWN: list[tuple[str, dict[str, Any]]] = [
    ("float8 blocks", {"tp": 2}),
    ("float8 blocks, grouped heads", {"dp_attention": 2, "ep": 2}),
    ("mxfp4", {"dp_attention": 2, "tp": 2, "ep": 2}),
    ("int4", {"tp": 2, "ep": 2}),
]
NARROW_LAYOUTS = [
    *NARROW_SHOWN,
    thorough("float8 blocks", {"tp": 2, "decode_context_parallel": 2}),
    thorough("float8 blocks", {"tp": 4, "ep": 2}),
    thorough("float8 blocks, grouped heads", {"tp": 2, "ep": 2}),
    thorough("mxfp4", {"tp": 2}),
    *(
        thorough(name, layout)
        for name in ("float8 blocks", "int8", "int4")
        for layout in LAYOUTS.values()
        if layout and (name, layout) not in NARROW_SHOWN
    ),
]


@pytest.mark.parametrize(("name", "layout"), NARROW_LAYOUTS, ids=str)
def test_parallel_ranks_of_a_checkpoint_in_few_bits_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, name: str, layout: dict[str, int]
) -> None:
    expected = alone.says(name, exact=True, dtype="bfloat16")
    config = settings_of(alone.folders[name], dtype="bfloat16", **layout)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), exact=True)
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    assert expected["weight_bytes"] < 0.8 * weight_bytes(read_spec(alone.folders[name]), torch.bfloat16)
    assert not UNEVEN.isdisjoint(layout) or ours["weight_bytes"] <= 1.1 * expected["weight_bytes"] / (len(others) + 1)


ACT_ORDERED_LAYOUTS = [
    {"tp": 2, "ep": 2},
    thorough({"tp": 4, "ep": 4}),
    thorough({"dp_attention": 2, "tp": 2, "ep": 4}),
    thorough({"tp": 2, "ffn_ranks": 1}),
]


@pytest.mark.parametrize("layout", ACT_ORDERED_LAYOUTS, ids=str)
def test_parallel_ranks_of_an_act_ordered_checkpoint_keep_four_bits_and_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, layout: dict[str, int]
) -> None:
    expected = alone.says("act-order", exact=True, dtype="bfloat16")
    config = settings_of(alone.folders["act-order"], dtype="bfloat16", **layout)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), exact=True)
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    own = own_spec(read_spec(alone.folders["act-order"]), RankPosition(layout_of(config)))
    assert ours["weight_bytes"] < 0.8 * weight_bytes(own, torch.bfloat16)


OF_EXPERTS = re.compile(r"(?<!self_attention)\.experts\.|mlp\.(?:in|out)put_linear")


def share_of(config: EngineConfig) -> float:
    """The bytes that the first rank has of a model: attention and what every token needs once in each group of ranks,
    each expert once, if experts have no ranks of their own."""
    sizes = {"experts": 0, "rest": 0}
    with safe_open(Path(config.model) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            one = file.get_slice(name)
            sizes["experts" if OF_EXPERTS.search(name) else "rest"] += 4 * math.prod(one.get_shape())
    layout = layout_of(config)
    return sizes["rest"] / layout.tp + (0 if layout.ffn_ranks else sizes["experts"] / layout.stage_size)


IN_GROUPS = [
    ("qwen3_moe", {"dp_attention": 2, "ep": 2}),
    ("qwen3_moe", {"dp_attention": 2, "tp": 2, "ep": 4, "expert_all2all": "torch-padded", "two_batch_overlap": "on"}),
    ("deepseek_v3", {"dp_attention": 2, "ep": 2, "expert_all2all": "torch-padded"}),
    ("mixtral", {"dp_attention": 2, "ep": 2, "two_batch_overlap": "on"}),
    ("deepseek_v4", {"dp_attention": 2, "ep": 2, "two_batch_overlap": "on"}),
    thorough("longcat_flash", {"dp_attention": 2, "ep": 2, "two_batch_overlap": "on"}),
    thorough("qwen3_next", {"dp_attention": 2, "ep": 2, "two_batch_overlap": "on", "expert_all2all": "torch-padded"}),
    *(thorough(one, {"dp_attention": 2, "ep": 2}) for one in ("deepseek_v3", "deepseek_v32", "mixtral", "gpt_oss")),
    thorough("qwen3_moe", {"dp_attention": 2, "tp": 2, "ep": 4}),
    ("deepseek_v3", {"dp_attention": 2, "tp": 2, "ep": 4}),
    ("gpt_oss", {"dp_attention": 2, "tp": 2, "ep": 2}),
    thorough("qwen3_moe", {"dp_attention": 2, "ep": 2, "pp": 2}),
    ("nemotron_h, latent", {"dp_attention": 2, "ep": 2}),
    ("deepseek_v4", {"dp_attention": 2, "tp": 2, "ep": 4}),
    ("longcat_flash", {"dp_attention": 2, "ep": 2}),
    thorough("longcat_flash", {"dp_attention": 2, "tp": 2, "ep": 2}),
    thorough("jamba", {"dp_attention": 2, "tp": 2, "ep": 4}),
    ("jetmoe", {"dp_attention": 2, "tp": 2, "ep": 2}),
    thorough("jetmoe", {"dp_attention": 2, "ep": 2}),
    ("zaya", {"dp_attention": 2, "ep": 2}),
    ("zaya", {"dp_attention": 2, "ep": 2, "pp": 2}),
    ("zaya", {"dp_attention": 2, "ep": 2, "pp": 2, "pp_microbatches": 1, "two_batch_overlap": "on"}),
]
APART = [
    ("gpt_oss", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2}),
    *(
        thorough(family, {"dp_attention": 2, "ffn_ranks": 2, "ep": 2})
        for family in ("deepseek_v3", "deepseek_v32", "qwen3_moe", "mixtral")
    ),
    ("deepseek_v3", {"tp": 2, "ffn_ranks": 2, "ep": 2}),
    ("deepseek_v4", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2}),
    *(thorough(family, {"tp": 2, "ffn_ranks": 2, "ep": 2}) for family in ("qwen3_moe", "mixtral", "gpt_oss")),
    ("qwen3_moe", {"pp": 2, "ffn_ranks": 2}),
    thorough("qwen3_next", {"pp": 2, "ffn_ranks": 2}),
    thorough("nemotron_h", {"pp": 2, "ffn_ranks": 2}),
    thorough("jetmoe", {"tp": 2, "ffn_ranks": 2, "ep": 2}),
]


@pytest.mark.parametrize(("family", "layout"), IN_GROUPS + APART, ids=str)
def test_parallel_groups_with_sequences_of_their_own_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, int]
) -> None:
    config = settings_of(alone.folders[family], **layout, micro_batch_tokens=2)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), counts=True)
    assert_same(alone.says(family), ours)  # in the last wave all groups but one have no tokens
    assert not any(other["error"] for other in others)
    assert ours["num_cached"] > 0
    assert "pp" in layout or family in ("gpt_oss", *RECURRENT) or ours["num_recomputed"] > 0
    assert "pp" in layout or ours["weight_bytes"] <= 1.1 * share_of(config)
    spec = read_spec(alone.folders[family])
    top_k = sum(layer.ffn.routing.top_k for layer in spec.layers if isinstance(layer.ffn, MoeSpec))
    assert ours["num_picks"] == ours["num_computed"] * top_k > 0


@pytest.mark.parametrize("micro_batches", [thorough(2), 3])
def test_parallel_ranks_with_attention_send_the_next_micro_batch_while_experts_have_one(
    processes: RankProcesses, alone: Alone, tmp_path: Path, micro_batches: int
) -> None:
    apart = {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batches": micro_batches, "micro_batch_tokens": 2}
    config = settings_of(alone.folders["mixtral"], **apart)
    ours, *others = processes.work(*ranks_of(config), waves=requests()[:1], turns=str(tmp_path))
    expected = alone.says("mixtral")
    first = {name: {key: expected[name][key] for key in ours["token_ids"]} for name in ("token_ids", "best")}
    assert_same(expected | first | {"vectors": {}}, ours)
    assert [other["error"] for other in others] == [""] * 3
    assert min(other["num_waited"] for other in others[1:]) > 20
    assert min(ours["waited_s"]) > 0


@pytest.mark.parametrize("layout", [thorough({"tp": 4, "ep": 2}), {"tp": 2, "ep": 2, "pp": 2}], ids=str)
def test_each_kind_of_parallel_goes_with_the_others(
    processes: RankProcesses, alone: Alone, layout: dict[str, int]
) -> None:
    ours, *_ = processes.work(*ranks_of(settings_of(alone.folders["qwen3_moe"], **layout)), waves=requests())
    assert_same(alone.says("qwen3_moe"), ours)


IN_TWO = [{"tp": 2, "ep": 2}, {"dp_attention": 2, "ep": 2, "speculate": "ngram"}, {"ffn_ranks": 1}]


@pytest.mark.parametrize("layout", IN_TWO, ids=str)
def test_parallel_steps_that_overlap_swap_and_sleep_say_the_same(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any]
) -> None:
    more = {"overlap": "on", "host_kv_memory_bytes": 1 << 20}
    config = settings_of(alone.folders["qwen3_moe"], **layout, **more)
    ours, _ = processes.work(*ranks_of(config), waves=requests(num_tokens=10), naps=True)
    assert_same(alone.says("qwen3_moe", num_tokens=10), ours)
    assert ours["num_swapped"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_attention": 2, "ep": 2}, {"pp": 2}, {"ffn_ranks": 1}], ids=str)
@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4", "granitemoehybrid, one group", "kimi_linear"])
def test_parallel_ranks_undo_drafts_over_recurrent_layers_alike(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any]
) -> None:
    few_words = dict.fromkeys((17, 230, 41), 30.0)  # so that some drafts are right
    waves = [
        [
            msgspec.structs.replace(
                one,
                prompt_ids=[*one.prompt_ids, *[17, 230, 41] * 4],
                sampling=Sampling(temperature=0.0, logit_bias=few_words),
            )
            for one in wave
            if not one.embed
        ]
        for wave in requests(num_tokens=30)
    ]
    folder = alone.folders[family]
    plain = settings_of(folder, speculate=Speculate.NGRAM)
    (expected,) = processes.work(*ranks_of(msgspec.structs.replace(plain, speculate=Speculate.OFF)), waves=waves)
    ours, *_ = processes.work(*ranks_of(settings_of(folder, speculate=Speculate.NGRAM, **layout)), waves=waves)
    assert ours["token_ids"] == expected["token_ids"]
    assert ours["num_accepted"] > 0


SHUFFLED = [
    thorough("deepseek_v3", {"tp": 4, "ep": 4, "redundant_experts": 4}),
    ("gpt_oss", {"tp": 4, "ep": 2, "rebalance_every_s": 1e9}),  # pieces of experts, with biases
    ("gpt_oss", {"tp": 4, "ep": 2, "rebalance_every_s": 1e9, "rebalance_mode": "blocking"}),
    ("qwen3_moe", {"dp_attention": 4, "ep": 4, "redundant_experts": 8, "overlap": "on", "quantization": "none"}),
    thorough("qwen3_moe", {"tp": 2, "ep": 2, "pp": 2, "redundant_experts": 2}),
    ("longcat_flash", {"dp_attention": 2, "ep": 2, "redundant_experts": 4}),
    ("mixtral", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "redundant_experts": 2, "micro_batch_tokens": 2}),
    thorough("mixtral", {"ffn_ranks": 2, "ep": 2, "redundant_experts": 2, "rebalance_mode": "blocking"}),
]


@pytest.mark.parametrize(("family", "layout"), SHUFFLED, ids=str)
def test_parallel_ranks_whose_experts_keep_moving_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any]
) -> None:
    config = settings_of(alone.folders[family], **layout)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), shuffles=True)
    assert_same(alone.says(family), ours)
    assert not any(other["error"] for other in others)
    num_rebalances = 10 if "rebalance_mode" in layout else 2  # a transfer in the background lasts a step at least
    assert ours["moves"]["rebalances"] >= num_rebalances
    assert ours["moves"]["bytes"] > num_rebalances * ours["weight_bytes"]
    assert not ours["moves"]["failed"]


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, thorough({"ffn_ranks": 2, "ep": 2})], ids=str)
def test_experts_stay_where_they_are_if_a_rank_cannot_transfer_them(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any]
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], **layout, redundant_experts=2)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), shuffles=True, lacks="moves")
    assert_same(alone.says("qwen3_moe"), ours)
    assert not any(other["error"] for other in others)
    assert ours["moves"]["failed"] >= 2
    assert not ours["moves"]["rebalances"] and not ours["moves"]["bytes"]


@pytest.mark.slow
def test_experts_stay_where_they_are_if_the_connections_for_transfers_break(
    processes: RankProcesses, alone: Alone
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], tp=2, ep=2, redundant_experts=2)
    work = {"waves": requests(), "again": True, "shuffles": True}
    ours, other = processes.work(*ranks_of(config), **work, lacks="links")
    assert not ours["error"] and not other["error"]
    assert_same(alone.says("qwen3_moe"), ours)
    assert ours["moves"] | {"failed": 1, "rebalances": 0, "bytes": 0} == ours["moves"]


SHARING = [
    {"tp": 4, "ep": 4},
    thorough({"dp_attention": 4, "ep": 4}),
    thorough({"tp": 2, "ep": 2, "pp": 2}),
    {"ffn_ranks": 2, "ep": 2},
]


@pytest.mark.parametrize("layout", SHARING, ids=str)
def test_parallel_ranks_share_the_experts_that_all_tokens_go_to(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any]
) -> None:
    settings = layout | {"redundant_experts": layout["ep"], "rebalance_every_s": 1.0}
    settings |= {"rebalance_mode": "blocking"}  # so that the experts have moved before the requests end
    config = settings_of(alone.folders["deepseek_v3"], **settings)
    ours, *_ = processes.work(*ranks_of(config), waves=requests(), hurries=0.05)
    assert_same(alone.says("deepseek_v3"), ours)
    assert ours["moves"]["rebalances"] >= 1
    assert ours["moves"]["planned"] == 1.0  # each rank has one of the two experts


@pytest.mark.parametrize("lacks", [thorough("host"), "device", thorough("cache")])
def test_parallel_ranks_of_which_one_has_no_room_to_sleep_or_wake_go_on_together(
    processes: RankProcesses, alone: Alone, tmp_path: Path, lacks: str
) -> None:
    folder = str(tmp_path / "asleep") if lacks == "device" else ""
    config = settings_of(alone.folders["qwen3_moe"], tp=2, ep=2, host_kv_memory_bytes=1 << 20, sleep_folder=folder)
    ours, other = processes.work(*ranks_of(config), waves=requests(), naps=True, lacks=lacks)
    assert_same(alone.says("qwen3_moe"), ours)
    assert not other["error"]
    first, *_ = ours["refusals"]
    assert ("does not fit" if lacks == "cache" else "another rank") in first
    assert not folder or Path(folder).exists()


@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("file", ""),
        ("both", "another rank is out of memory, or has failed; see its log"),
        thorough(
            "own file", "cannot be read: Input/output error; and the checkpoint does not replace it: no such file"
        ),
    ],
)
def test_parallel_ranks_of_which_one_cannot_read_its_file_wake_together_or_none(
    processes: RankProcesses, alone: Alone, tmp_path: Path, lacks: str, words: str
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], tp=2, ep=2, sleep_folder=str(tmp_path))
    ours, other = processes.work(*ranks_of(config), waves=requests(), naps=True, lacks=lacks)
    assert_same(alone.says("qwen3_moe"), ours)
    assert not other["error"]
    assert words in ours["refusals"][0] and bool(ours["refusals"][0]) is bool(words)


def test_parallel_ranks_in_few_bits_say_nearly_the_same(processes: RankProcesses, alone: Alone) -> None:
    config = settings_of(alone.folders["qwen3_moe"], tp=2, ep=2, quantization="int8")
    ours, other = processes.work(*ranks_of(config), waves=requests())
    assert not ours["error"] and not other["error"]
    expected = alone.says("qwen3_moe", quantization="int8")
    first = [tokens[0] == ours["token_ids"][key][0] for key, tokens in expected["token_ids"].items() if tokens]
    assert sum(first) >= 0.7 * len(first)
    assert ours["weight_bytes"] < 0.6 * expected["weight_bytes"]
