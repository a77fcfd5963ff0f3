"""Several steps in the stages of a pipeline at once, in real processes on gloo, give the same answers as one rank."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.engine.test_overlap import KINDS

from moiety_engine.config import EngineConfig
from moiety_engine.errors import InvalidConfig
from moiety_wire.engine_choices import Batching, TwoBatchOverlap
from moiety_wire.messages import Sampling

from .rank_processes import Alone, RankProcesses, assert_same, ranks_of, requests, settings_of, thorough

LAYOUTS: list[Any] = [
    ({"pp": 2}, 2),
    ({"pp": 3}, 3),
    ({"tp": 2, "pp": 2}, 2),
    thorough({"dp_attention": 2, "ep": 2, "pp": 2}, 2),
    thorough({"pp": 2, "pp_microbatches": 3}, 3),
    thorough({"pp": 2, "speculate": "ngram"}, 2),
    ({"pp": 2, "pp_microbatches": 1}, 0),
    thorough({"pp": 2, "ffn_ranks": 1}, 0),
]


@pytest.mark.parametrize(("settings", "most_in_flight"), LAYOUTS, ids=str)
def test_ranks_with_several_steps_in_flight_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, settings: dict[str, Any], most_in_flight: int
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], **settings)
    ours, *others = processes.work(*ranks_of(config), waves=requests(num_tokens=10), counts=True)
    assert_same(alone.says("qwen3_moe", num_tokens=10), ours)
    assert not any(other["error"] for other in others)
    assert ours["most_in_flight"] == most_in_flight
    assert ours["num_cached"] > 0
    assert "dp_attention" in settings or ours["num_recomputed"] > 0
    assert ours["num_picks"] == ours["num_computed"] * 2 * 2 or "speculate" in settings  # two layers, two experts each


@pytest.mark.parametrize("layout", [{"pp": 2}, thorough({"pp": 3}), thorough({"tp": 2, "pp": 2})], ids=str)
def test_requests_aborted_in_flight_change_no_other_answer_and_hold_no_blocks(
    processes: RankProcesses, alone: Alone, layout: dict[str, int]
) -> None:
    aborted = [1, 4]
    config = settings_of(alone.folders["qwen3_moe"], **layout, host_kv_memory_bytes=1 << 20)
    ours, *others = processes.work(*ranks_of(config), waves=requests(num_tokens=10), aborts=aborted, naps=True)
    assert not ours["error"] and not any(other["error"] for other in others)
    assert ours["most_in_flight"] > 1
    assert ours["num_aborted"] == len(aborted)
    expected = alone.says("qwen3_moe", num_tokens=10)
    whole = {key: tokens for key, tokens in ours["token_ids"].items() if int(key) not in aborted}
    of_whole = {key: tokens for key, tokens in expected["token_ids"].items() if key in whole}
    assert_same(expected | {"token_ids": of_whole}, ours | {"token_ids": whole})
    assert all(0 < len(ours["token_ids"][str(key)]) < 10 for key in aborted)
    assert ours["num_used_blocks"] == 0  # how many were swapped depends on when the requests are aborted


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_tokens_sampled_after_later_steps_were_planned_follow_the_same_rules(
    processes: RankProcesses, alone: Alone, speculate: str
) -> None:
    waves = [
        [
            msgspec.structs.replace(one, sampling=Sampling(**{"num_logprobs": 2} | KINDS[one.key % len(KINDS)]))
            for one in wave
            if not one.embed
        ]
        for wave in requests(num_tokens=16)
    ]
    folder = alone.folders["mixtral"]
    (expected,) = processes.work(*ranks_of(settings_of(folder)), waves=waves, exact=True)
    ours, *_ = processes.work(*ranks_of(settings_of(folder, pp=2, speculate=speculate)), waves=waves, exact=True)
    assert ours["most_in_flight"] == 2
    assert_same(expected, ours)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "--pp-microbatches 2 needs stages"),
        ({"pp": 2, "ffn_ranks": 1}, "--pp-microbatches 2 is not available with --ffn-ranks"),
        ({"pp": 2, "batching": Batching.PADDED}, "--pp-microbatches 2 is not available with padded batching"),
    ],
)
def test_several_steps_in_flight_are_refused_where_there_can_be_one(settings: dict[str, Any], words: str) -> None:
    assert EngineConfig(model="folder", name="name", pp_microbatches=1, **settings).pp_microbatches == 1
    with pytest.raises(InvalidConfig, match=words):
        EngineConfig(model="folder", name="name", pp_microbatches=2, **settings)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"two_batch_overlap": TwoBatchOverlap.ON, "dp_attention": 2, "ep": 2}, "--two-batch-overlap on is not"),
        ({"expert_batching": True}, "--expert-batching is not"),
    ],
)
def test_options_for_one_step_at_a_time_are_refused_with_several_in_flight(wanted: dict[str, Any], words: str) -> None:
    for several in ({}, {"pp_microbatches": 2}):
        with pytest.raises(InvalidConfig, match=f"{words} available with several steps.*--pp-microbatches 1"):
            EngineConfig(model="folder", name="name", pp=2, **several, **wanted)
    for one in ({"pp": 2, "pp_microbatches": 1}, {"pp": 2, "ffn_ranks": 1} if "ep" not in wanted else {"pp": 1}):
        assert EngineConfig(model="folder", name="name", **one, **wanted).steps_in_flight == 1
