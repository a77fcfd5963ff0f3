"""Expert offloading over several ranks: each rank offloads its experts, and answers have the bits of all experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.config import EngineConfig, Offload, OffloadConfig
from moiety_engine.distribution.layout import RankPosition, layout_of
from moiety_engine.model.families import read_spec
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec

from .rank_processes import RankProcesses, ranks_of, requests, settings_of, thorough

LAYOUTS: list[Any] = [
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("deepseek_v3", {"pp": 2}),  # the first stage has no experts
    ("qwen3_moe", {"dp_attention": 2, "ep": 2}),
    ("qwen3_moe", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batch_tokens": 2}),
    thorough("gpt_oss", {"tp": 2, "ep": 2}),
    thorough("gpt_oss", {"dp_attention": 2, "tp": 2, "ep": 2}),
    thorough("qwen3_moe", {"tp": 4, "ep": 2}),
    thorough("qwen3_moe", {"tp": 4, "ep": 2, "decode_context_parallel": 2}),
    thorough("qwen3_moe", {"prefill_context_parallel": 2, "ep": 2}),
    thorough("qwen3_moe", {"pp": 2, "ffn_ranks": 2}),
    thorough("qwen3_moe", {"tp": 2, "ep": 2, "redundant_experts": 2, "rebalance_every_s": 0.0}),
]


def experts_of_ranks(config: EngineConfig) -> list[list[MoeSpec]]:
    """Return the MoE layers of which each rank holds experts."""
    spec, layout = read_spec(Path(config.model)), layout_of(config)
    owns = [own_spec(spec, RankPosition(layout, rank)) for rank in range(layout.num_ranks)]
    ffns = [[own.layers[index].ffn for index in own.moe_layers] for own in owns]
    return [[ffn for ffn in of_rank if isinstance(ffn, MoeSpec) and ffn.num_held] for of_rank in ffns]


def offloaded(config: EngineConfig, folder: Path, num_experts: int) -> EngineConfig:
    """Return the configuration with slots for `num_experts` experts of each layer, on the rank that needs most."""
    size, most = read_spec(Path(config.model)).hidden_size, 0
    for held in experts_of_ranks(config):
        biases = [ffn.up_width + size if ffn.bias else 0 for ffn in held]
        products = [(ffn.up_width + ffn.width) * size for ffn in held]
        most = max(most, 4 * (sum(products) + sum(biases)))
    what = OffloadConfig(what=Offload.EXPERTS, memory_bytes=num_experts * most, folder=str(folder))
    return msgspec.structs.replace(config, offload=what)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_ranks_with_offloaded_experts_give_the_bits_of_ranks_with_all_experts(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    may_be_invariant = "redundant_experts" not in layout and ("tp" not in layout or layout.keys() <= {"tp", "ep"})
    config = settings_of(folders[family], batch_invariant=may_be_invariant, **layout)
    expected, *_ = processes.work(*ranks_of(config), waves=requests())
    few = offloaded(config, tmp_path / "experts", num_experts=3)
    held = experts_of_ranks(config)
    num_slots = sum(min(3, ffn.num_held) for of_rank in held for ffn in of_rank)
    has_misses = family != "deepseek_v3"  # which routes all tokens to two experts
    least = num_slots, 1, int(has_misses)
    ours, *others = processes.work(*ranks_of(few), waves=requests(), offloaded=least)
    assert not expected["error"] and not ours["error"] and not any(other["error"] for other in others)
    assert ours["token_ids"] == expected["token_ids"]
    assert ours["best"] == expected["best"]
    assert ours["vectors"] == expected["vectors"]
    assert ours["num_expert_slots"] == num_slots
    assert ours["num_expert_hits"] > 0
    assert (ours["num_expert_misses"] > 0) is has_misses
    files = {path.name for path in (tmp_path / "experts").glob("experts-*.bin")}
    assert len(files) == sum(bool(of_rank) for of_rank in held)
    again, *_ = processes.work(*ranks_of(few), waves=requests()[:1])  # from the files of the first start
    assert {key: ours["token_ids"][key] for key in again["token_ids"]} == again["token_ids"]
    assert {path.name for path in (tmp_path / "experts").iterdir() if path.suffix == ".bin"} == files


def test_ranks_with_offloaded_experts_sleep_and_wake(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = settings_of(folders["qwen3_moe"], tp=2, ep=2, overlap="on")
    expected, _ = processes.work(*ranks_of(config), waves=requests())
    few = offloaded(config, tmp_path, num_experts=3)
    ours, other = processes.work(*ranks_of(few), waves=requests(), naps=True)
    assert not ours["error"] and not other["error"]
    assert ours["token_ids"] == expected["token_ids"]


def test_too_little_memory_for_the_experts_of_a_token_on_a_rank_ends_all_with_the_reason(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Each rank answers with the reason, or ends if the other rank's reason comes first."""
    config = offloaded(settings_of(folders["qwen3_moe"], tp=2), tmp_path, num_experts=1)
    try:
        reasons = [answer["error"] for answer in processes.work(*ranks_of(config), waves=requests())]
    except AssertionError as exc:
        reasons = [str(exc)]
    assert all("a token needs 2: set --expert-memory-bytes to at least" in reason for reason in reasons)
