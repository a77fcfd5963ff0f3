"""Draft models and MTP layers over several ranks, in real processes on gloo, draft what they draft on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.config import EngineConfig, Overlap, Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

from .mtp_checkpoints import (
    NEMOTRON_NAMES,
    let_tokens_decide,
    write_one_that_reads_tokens,
    write_one_that_reads_what_was_made,
    write_one_with_several_layers,
)
from .rank_processes import RankProcesses, assert_same, ranks_of, thorough, write_checkpoint

STEP_S = 0.01  # by the loop's clock, so that drafts pay


def settings_of(folder: Path, **settings: Any) -> EngineConfig:
    tight: dict[str, Any] = {"block_size": 4, "max_batch_tokens": 48, "max_running": 8, "kv_memory_bytes": 1 << 20}
    given = {"model": str(folder), "name": "tiny", "device": "cpu", "dtype": "float32"} | tight | settings
    return EngineConfig(**given)


def requests() -> list[list[CoreSubmit]]:
    """Return waves of requests, greedy and seeded, with common prefixes; the last wave repeats one alone."""

    def one(key: int, like: int) -> CoreSubmit:
        prompt = [3 + (i * 7 + like % 2 * 5) % 60 for i in range(9)] + [
            5 + (like * 31 + i) % 50 for i in range(3 * like)
        ]
        sampled = Sampling(temperature=0.8, top_p=0.9, seed=like, num_logprobs=2)
        sampling = sampled if like % 3 == 2 else Sampling(temperature=0.0, num_logprobs=2)
        return CoreSubmit(key, "t", STANDARD, prompt, sampling, 20, 0, [], 20, b"s", 0)

    return [[one(key, key) for key in range(5)], [one(5, 1), one(6, 7)], [one(7, 4)]]


def with_bias(submit: CoreSubmit, logit_bias: dict[int, float]) -> CoreSubmit:
    sampling = msgspec.structs.replace(submit.sampling, logit_bias=logit_bias)
    return msgspec.structs.replace(submit, sampling=sampling)


def check(
    processes: RankProcesses,
    folder: Path,
    layout: dict[str, Any],
    logit_bias: dict[int, float] | None = None,
    **drafting: Any,
) -> None:
    """Check that answers equal those of one rank without drafts, and that draft tokens were accepted.

    `logit_bias`: of all requests."""
    waves = [[with_bias(one, logit_bias or {}) for one in wave] for wave in requests()]
    (expected,) = processes.work(*ranks_of(settings_of(folder)), waves=waves, hurries=STEP_S)
    config = settings_of(folder, **drafting, **layout)
    ours, *others = processes.work(*ranks_of(config), waves=waves, hurries=STEP_S, naps=True)
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    assert ours["num_accepted"] > 20
    assert ours["num_cached"] > 0 or not config.prefix_caching


MTP_LAYOUTS = [
    {"tp": 2},
    thorough({"tp": 2, "ep": 2}),
    {"dp_attention": 2, "ep": 2},
    thorough({"dp_attention": 2, "tp": 2, "ep": 4}),
    thorough({"dp_attention": 2, "ep": 2, "overlap": Overlap.ON}),
    thorough({"tp": 2, "ep": 2, "overlap": Overlap.ON}),
    {"dp_attention": 2, "ffn_ranks": 1},
    thorough({"tp": 2, "ffn_ranks": 2, "ep": 2}),
    thorough({"dp_attention": 2, "ffn_ranks": 2, "ep": 2}),
    thorough({"ffn_ranks": 1, "overlap": Overlap.ON}),
]


@pytest.mark.parametrize("layout", MTP_LAYOUTS, ids=str)
@pytest.mark.parametrize("reads", ["tokens", "hidden states", "hidden states, three layers"])
def test_an_mtp_layer_drafts_over_ranks(
    processes: RankProcesses, tmp_path: Path, reads: str, layout: dict[str, Any]
) -> None:
    write = {"tokens": write_one_that_reads_tokens, "hidden states": write_one_that_reads_what_was_made}
    write.get(reads, write_one_with_several_layers)(tmp_path)
    check(processes, tmp_path, layout, speculate=Speculate.MTP)


MTP_DIVIDED = [
    {"tp": 2, "decode_context_parallel": 2},
    thorough({"tp": 4, "ep": 2, "decode_context_parallel": 2}),
]


@pytest.mark.parametrize("layout", MTP_DIVIDED, ids=str)
def test_an_mtp_layer_drafts_over_ranks_that_divide_positions(
    processes: RankProcesses, tmp_path: Path, layout: dict[str, Any]
) -> None:
    write_one_that_reads_tokens(tmp_path)
    check(processes, tmp_path, layout, speculate=Speculate.MTP)


MOVING = {"dp_attention": 2, "ep": 2, "redundant_experts": 2, "rebalance_every_s": 5.0}


def test_an_mtp_layer_drafts_while_the_experts_of_the_model_move(processes: RankProcesses, tmp_path: Path) -> None:
    write_one_that_reads_what_was_made(tmp_path)
    config = settings_of(tmp_path, speculate=Speculate.MTP, **MOVING)
    (expected,) = processes.work(*ranks_of(settings_of(tmp_path)), waves=requests(), hurries=STEP_S)
    ours, _ = processes.work(*ranks_of(config), waves=requests(), hurries=STEP_S, shuffles=True)
    assert_same(expected, ours)
    assert ours["num_accepted"] > 20 and ours["moves"]["bytes"] > 0


@pytest.mark.slow
def test_an_mtp_layer_drafts_while_the_experts_of_the_model_move_to_expert_ranks_and_back(
    processes: RankProcesses, tmp_path: Path
) -> None:
    write_one_that_reads_what_was_made(tmp_path)
    config = settings_of(tmp_path, speculate=Speculate.MTP, dp_attention=2, ep=2)
    (expected,) = processes.work(*ranks_of(settings_of(tmp_path)), waves=requests(), hurries=STEP_S)
    ours, *_ = processes.work((config, None), waves=requests(), hurries=STEP_S, again=True, scales=[1, 0])
    assert_same(expected, ours)
    assert (ours["expert_ranks"], ours["scaling_problems"]) == ([1, 0], ["", ""])
    assert ours["num_accepted"] > 20


def test_an_mtp_layer_drafts_without_an_excluded_rank(processes: RankProcesses, tmp_path: Path) -> None:
    write_one_that_reads_what_was_made(tmp_path)
    config = settings_of(tmp_path, speculate=Speculate.MTP, dp_attention=3, ep=1, exclude_rank_after_s=5)
    (expected,) = processes.work(*ranks_of(settings_of(tmp_path)), waves=requests(), hurries=STEP_S)
    ours, _ = processes.work(*ranks_of(config)[:2], waves=requests(), hurries=STEP_S)
    assert_same(expected, ours)
    assert ours["num_accepted"] > 20 and ours["num_excluded"] == 1


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, thorough({"dp_attention": 2, "ep": 2})], ids=str)
def test_the_mtp_layer_of_deepseek_v4_drafts_over_ranks(
    processes: RankProcesses, tmp_path: Path, layout: dict[str, Any]
) -> None:
    from tests.model.conftest import write_checkpoint
    from tests.model.test_mtp_v4 import WITH_MTP_LAYER, publish_v4

    publish_v4(write_checkpoint(tmp_path, "one more", variants=WITH_MTP_LAYER))
    two_words = {17: 32.0, 23: 30.0}  # so that some drafts are right
    check(
        processes, tmp_path, layout, two_words, speculate=Speculate.MTP, kv_memory_bytes=1 << 24, prefix_caching=False
    )


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, thorough({"dp_attention": 2, "ep": 2})], ids=str)
def test_the_mtp_layer_of_nemotron_drafts_over_ranks(
    processes: RankProcesses, tmp_path: Path, layout: dict[str, Any]
) -> None:
    from tests.model.conftest import write_checkpoint
    from tests.model.test_mtp_nemotron import publish_as_nemotron, variant_with

    small = {"mamba_head_dim": 16, "ssm_state_size": 16, "moe_latent_size": 32}
    variants = variant_with("full_attention", "moe", **small)
    publish_as_nemotron(write_checkpoint(tmp_path, "with mtp", variants=variants))
    let_tokens_decide(tmp_path, NEMOTRON_NAMES)
    two_words = {17: 12.0, 23: 12.0}  # so that some drafts are right
    check(processes, tmp_path, layout, two_words, speculate=Speculate.MTP, kv_memory_bytes=1 << 24)


DRAFT_LAYOUTS = [
    thorough({"tp": 2, "ep": 2}),
    thorough({"dp_attention": 2, "ep": 2}),
    {"pp": 2},
    {"dp_attention": 2, "ffn_ranks": 1},
    thorough({"pp": 2, "ffn_ranks": 1}),
]


@pytest.mark.parametrize("layout", DRAFT_LAYOUTS, ids=str)
def test_a_draft_model_drafts_over_ranks(
    processes: RankProcesses, folders: dict[str, Path], layout: dict[str, Any]
) -> None:
    folder = folders["mixtral"]
    check(processes, folder, layout, speculate=Speculate.DRAFT, draft_model=str(folder))


WITHOUT_EXPERTS = [
    {"ffn_ranks": 1},
    thorough({"dp_attention": 2, "ffn_ranks": 2, "ep": 2}),
    thorough({"pp": 2, "ffn_ranks": 1}),
    thorough({"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "overlap": Overlap.ON}),
    thorough({"tp": 2, "ep": 2}),
    {"dp_attention": 2, "ep": 2, "redundant_experts": 2, "rebalance_every_s": 5.0},
]
TWO_WORDS = {17: 32.0, 23: 30.0}  # so that some drafts of another model are right


@pytest.mark.parametrize("layout", WITHOUT_EXPERTS, ids=str)
def test_a_draft_model_without_experts_drafts_for_a_model_whose_experts_are_on_several_ranks(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    draft = write_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[0, 1, 2])
    check(processes, folders["qwen3_moe"], layout, TWO_WORDS, speculate=Speculate.DRAFT, draft_model=str(draft))


@pytest.mark.slow
def test_a_draft_model_drafts_while_expert_ranks_are_added_and_removed(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    draft, folder = write_checkpoint(tmp_path, "qwen3_moe", mlp_only_layers=[0, 1, 2]), folders["qwen3_moe"]
    waves = [[with_bias(one, TWO_WORDS) for one in wave] for wave in requests()]
    (expected,) = processes.work(*ranks_of(settings_of(folder)), waves=waves, hurries=STEP_S)
    config = settings_of(folder, ffn_ranks=1, speculate=Speculate.DRAFT, draft_model=str(draft))
    (ours,) = processes.work((config, None), waves=waves, hurries=STEP_S, again=True, scales=[2, 1])
    assert_same(expected, ours)
    assert ours["scaling_problems"] == ["", ""] and ours["num_accepted"] > 20


def test_a_draft_model_that_is_refused_ends_all_ranks_with_the_reason(
    processes: RankProcesses, folders: dict[str, Path]
) -> None:
    config = settings_of(
        folders["mixtral"], tp=4, ep=4, speculate=Speculate.DRAFT, draft_model=str(folders["qwen3_next"])
    )
    try:
        told = [answer["error"] for answer in processes.work(*ranks_of(config), waves=requests())]
    except AssertionError as exc:  # the first rank that refuses ends the others, which log its reason
        told = [str(exc)]
    assert all("the draft model has recurrent layers" in one for one in told)


def test_drafts_of_an_mtp_layer_are_refused_where_its_hidden_states_are_on_another_rank(tmp_path: Path) -> None:
    write_one_that_reads_tokens(tmp_path)
    with pytest.raises(InvalidConfig, match="not available with --pp"):
        load_loop(settings_of(tmp_path, pp=2, speculate=Speculate.MTP))
