"""Numbers of ranks that do not form a layout are refused, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moiety_engine.config import EngineConfig
from moiety_engine.distribution.layout import Layout, RankPosition, layout_of, leaving, without
from moiety_engine.distribution.rendezvous_address import rendezvous_from, require_hosts_apart
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.families import read_spec
from moiety_engine.model.tensor_shards import own_spec
from moiety_wire.engine_choices import Batching

NOTED = {"dp_attention": 2, "exclude_rank_after_s": 5, "rank_failure_log": "losses"}
LAUNCHED = {"WORLD_SIZE": "4", "RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ep": 2}, "--ep 2 does not divide the 1 ranks"),
        ({"tp": 0}, "--tp, .* must be at least 1"),
        (
            {"tp": 2, "dp_attention": 2, "batch_invariant": True},
            "--batch-invariant is not available with --tp together",
        ),
        (
            {"dp_attention": 2, "tp": 2, "ep": 3},
            "--ep 3 does not divide the 4 ranks",
        ),
        ({"ffn_ranks": 3, "ep": 2}, "--ep 2 does not divide the 3 ranks of --ffn-ranks"),
        ({"ffn_ranks": -1}, "--ffn-ranks must be 0"),
        ({"tp": 2, "ffn_ranks": 1, "batch_invariant": True}, "--batch-invariant is not available with --tp together"),
        ({"tp": 2, "ep": 2, "redundant_experts": 2, "batch_invariant": True}, "not available with --redundant-experts"),
        ({"dp_attention": 2, "batching": Batching.PADDED}, "choose another --batching, or leave out --dp-attention"),
        ({"tp": 2, "ep": 2, "redundant_experts": 3}, "--redundant-experts 3 cannot be divided by --ep 2: use 4"),
        ({"tp": 2, "rebalance_every_s": 60}, "leave them out, or use --ep"),
        ({"tp": 2, "redundant_experts": 2, "rebalance_every_s": 0}, "leave them out, or use --ep"),
        ({"redundant_experts": -1}, "redundant_experts must be 0"),
        ({"exclude_rank_after_s": 5}, "--exclude-rank-after-s needs more than one rank"),
        ({"tp": 2, "exclude_rank_after_s": 61}, r"at most --join-timeout-s \(60\), not 61"),
        (
            {"dp_attention": 2, "exclude_rank_after_s": 0},
            r"must be more than 0 and at most --join-timeout-s \(60\), not 0",
        ),
        ({"tp": 4, "exclude_rank_after_s": 5}, "each rank is required here"),
        ({"tp": 2, "pp": 2, "exclude_rank_after_s": 5}, "each rank is required here"),
        ({"dp_attention": 2, "pp": 2, "exclude_rank_after_s": 5}, "has ranks in each stage"),
        ({"tp": 3, "ffn_ranks": 1, "exclude_rank_after_s": 5}, "each rank is required here"),
        (NOTED | {"exclude_rank_after_failures": 0}, "--exclude-rank-after-failures must be at least 1"),
        (NOTED | {"rank_failures_within_s": 0}, "--rank-failures-within-s must be more than 0"),
        ({"tp": 2, "rank_failure_log": "losses"}, "--rank-failure-log needs --exclude-rank-after-s"),
        ({"tp": 2, "exclude_rank_after_failures": 9}, "need --rank-failure-log"),
        (
            {"dp_attention": 2, "exclude_rank_after_s": 5, "rank_failures_within_s": 60},
            "need --rank-failure-log",
        ),
    ],
)
def test_parallel_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        layout_of(EngineConfig(model="m", name="n", **settings))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tp=3), "4 query heads cannot be divided by --tp 3"),
        (Layout(tp=32), "too small for --tp 32"),
        (Layout(tp=16, ep=16), "4 query heads cannot be divided by --tp 16"),
        (Layout(dp=16, ep=16), "experts cannot be divided by --ep 16"),
        (Layout(ep=3, ffn_ranks=3), "8 experts cannot be divided by --ep 3"),
        (Layout(ffn_ranks=3), "32 columns of an expert cannot be divided by ffn-ranks ÷ ep = 3"),
        (Layout(pp=3), "--pp 3 is more than the model's 2 layers"),
        (
            Layout(tp=2, ep=2, redundant_experts=10),
            "more slots than the model's 8 experts: use at most 8",
        ),
    ],
    ids=str,
)
def test_a_model_that_parallel_ranks_cannot_divide_is_refused(checkpoint: Path, layout: Layout, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        own_spec(read_spec(checkpoint), RankPosition(layout))


def test_every_layer_and_expert_is_on_some_parallel_rank_and_the_first_stage_has_the_most_layers() -> None:
    layout = Layout(tp=4, ep=2, pp=3)
    rank_positions = [RankPosition(layout, rank) for rank in range(layout.num_ranks)]
    layers = [rank_position.layers_of(7) for rank_position in rank_positions[:: layout.stage_size]]
    assert [index for some in layers for index in some] == list(range(7))
    assert max(map(len, layers)) == len(layers[0])
    pieces = {
        (rank_position.pp_rank, rank_position.ep_rank, rank_position.cut_rank) for rank_position in rank_positions
    }
    assert pieces == {(stage, part, piece) for stage in range(3) for part in range(2) for piece in range(2)}


def test_redundant_slots_hold_experts_of_other_parts_until_they_are_rebalanced() -> None:
    layout = Layout(dp=2, tp=2, ep=4, redundant_experts=8)
    assert layout.slots(8) == (0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 0, 1)
    assert [RankPosition(layout, rank).slots_of(8) for rank in range(4)] == [
        (0, 1, 2, 3),
        (2, 3, 4, 5),
        (4, 5, 6, 7),
        (6, 7, 0, 1),
    ]
    pieces = Layout(tp=4, ep=2)
    assert [RankPosition(pieces, rank).peer(1) for rank in range(4)] == [2, 3, 2, 3]


GROUPS = Layout(dp=3, tp=2, ep=3)
APART = Layout(dp=2, ep=2, ffn_ranks=4, redundant_experts=2)


@pytest.mark.parametrize(
    ("layout", "away", "left"),
    [
        (GROUPS, {5}, Layout(dp=2, tp=2, ep=4, excluded=(4, 5))),
        (GROUPS, {2, 5}, Layout(dp=1, tp=2, ep=2, excluded=(2, 3, 4, 5))),
        (APART, {3, 4}, Layout(dp=2, ep=2, ffn_ranks=2, redundant_experts=2, excluded=(1, 2))),
        (APART, {1}, Layout(dp=1, ep=2, ffn_ranks=4, redundant_experts=2)),
        (Layout(tp=2, pp=2, ep=3, ffn_ranks=3), {4}, Layout(tp=2, pp=2, ep=2, ffn_ranks=2, excluded=(0,))),
    ],
    ids=str,
)
def test_parallel_ranks_that_are_done_without_take_those_along_that_share_heads_with_them(
    layout: Layout, away: set[int], left: Layout
) -> None:
    found = without(layout, leaving(layout, away))
    assert found == left
    num_experts = 12
    held = [RankPosition(found, rank).slots_of(num_experts) for rank in range(found.num_ranks)]
    held = held[found.attention_ranks :] or held
    assert {expert for slots in held for expert in slots} == set(range(num_experts))
    if found.excluded:
        assert {len(slots) for slots in held} == {found.slots_each(num_experts)}
        assert all(len(set(slots)) == len(slots) for slots in held)


def test_launcher_environment_of_parallel_ranks_is_read_or_refused() -> None:
    found = rendezvous_from(LAUNCHED)
    assert found is not None
    assert (found.rank, found.num_ranks, found.local_rank, found.host, found.port) == (2, 4, 1, "10.0.0.1", 29500)
    assert rendezvous_from({}) is rendezvous_from({"WORLD_SIZE": "1", "RANK": "0"}) is None
    require_hosts_apart(5, found)
    by_torchrun = rendezvous_from(LAUNCHED | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert by_torchrun is not None
    require_hosts_apart(None, by_torchrun)
    with pytest.raises(InvalidConfig, match="is not available under torchrun"):
        require_hosts_apart(5, by_torchrun)
    with pytest.raises(InvalidConfig, match="start with torchrun or deepspeed, or unset WORLD_SIZE"):
        rendezvous_from({"WORLD_SIZE": "2"})
