"""Every implementation of the all-to-all of experts keeps the contract: each token gets the sum of all its experts, in
real processes over gloo, whatever the routing."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.config import EngineConfig
from moiety_engine.distribution.deep_ep_all_to_all import require_deep_ep
from moiety_engine.distribution.layout import layout_of
from moiety_engine.distribution.row_capacity import SMALL_BOUND, RowCapacity
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.batch import Spread
from moiety_wire.engine_choices import ExpertAll2All

RANK = Path(__file__).parent / "all_to_all_rank.py"
WAIT_S = 120
LAYOUTS = ["2x1x2", pytest.param("4x1x2", marks=pytest.mark.thorough)]  # the second: each expert in two shards


def results_of(implementation: str, layout: str, folder: Path) -> list[dict[str, Any]]:
    """Run all ranks, and return what each of them prints."""
    dp, tp, _ = map(int, layout.split("x"))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), implementation, layout, str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(dp * tp)
    ]
    found = []
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=WAIT_S)
            assert rank.returncode == 0, errors
            found.append(json.loads(out))
    finally:
        for rank in ranks:
            rank.kill()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_row_counts_bring_each_token_to_its_experts(tmp_path: Path, layout: str) -> None:
    for found in results_of("torch", layout, tmp_path):
        last = found["counts"][-1]
        assert (last["counts"], last["rows"]) == (1, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_capacities_bring_each_token_to_its_experts_without_row_counts(tmp_path: Path, layout: str) -> None:
    everyone = results_of("torch-padded", layout, tmp_path)
    assert len({found["repeats"] for found in everyone}) == 1, "all ranks repeat the same passes"
    for found in everyone:
        counts, unbounded = found["counts"], 3
        assert [one.get("counts", 0) for one in counts] == [2 * (i == unbounded) for i in range(len(counts))]
        to_one_rank, skewed, after = counts[-5], counts[-4], counts[-3]
        assert to_one_rank["rows"] == 2
        assert to_one_rank["sent"] < counts[6]["sent"], "capacities follow the routing"
        assert found["repeats"] == 1
        assert skewed["rows"] == 4, "a pass with more rows than room is run again"
        assert after["rows"] == 2, "then there is room"


def test_the_deepep_implementation_follows_the_documented_buffer(tmp_path: Path) -> None:
    for found in results_of("fake-deepep", "2x1x2", tmp_path):
        assert not any(found["counts"])
        assert found["num_open"] == [2, 2, 1], "a buffer is open until the pass that replaces it has ended, no longer"


def test_deepep_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidConfig, match="needs a CUDA device, not cpu"):
        require_deep_ep(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(InvalidConfig, match="sends bfloat16 rows, not"):
        require_deep_ep(torch.device("cuda"), torch.float32)


def test_deepep_is_refused_where_it_is_not_installed() -> None:
    if find_spec("deep_ep") is not None:
        pytest.skip("DeepEP is installed")
    with pytest.raises(InvalidConfig, match="needs the package deep_ep, which cannot be imported"):
        require_deep_ep(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tp": 2, "ep": 2}, "--dp-attention"),
        ({"dp_attention": 2, "ffn_ranks": 2, "ep": 2}, "--ffn-ranks"),
        ({"dp_attention": 2, "ep": 1}, "--ep 2"),
        ({"dp_attention": 2, "ep": 2, "adapters": {"a": "folder"}}, "adapters"),
        ({"dp_attention": 2, "ep": 2, "batch_invariant": True}, "--batch-invariant"),
    ],
)
def test_deepep_is_refused_on_layouts_that_it_does_not_support(settings: dict[str, Any], match: str) -> None:
    config = EngineConfig(model="folder", name="name", expert_all2all=ExpertAll2All.DEEPEP, **settings)
    with pytest.raises(InvalidConfig, match=match):
        layout_of(config)


@given(st.lists(st.tuples(st.integers(1, 4000), st.floats(0, 1)), max_size=30), st.integers(1, 4000))
def test_a_capacity_is_within_the_bound_and_follows_the_largest_recent_share(
    passes: list[tuple[int, float]], bound: int
) -> None:
    known = RowCapacity(2)
    for its_bound, share in passes:
        known.observe([round(share * its_bound), 0], its_bound)
    capacity_R = known.of_step(bound)
    assert all(0 < capacity <= bound for capacity in capacity_R)
    if bound <= SMALL_BOUND:
        assert capacity_R == [bound] * 2
    large = [(its_bound, share) for its_bound, share in passes if its_bound > SMALL_BOUND]
    if large:
        its_bound, share = large[-1]
        assert known.of_step(its_bound)[0] >= round(share * its_bound)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 4))
def test_share_bounds_cover_every_rank_of_every_micro_batch(num_tokens: list[int], tp: int, parts: int) -> None:
    bounds = Spread(tuple(num_tokens), (), torch.empty(0)).share_bounds(tp, parts)
    count = max(1, parts)
    assert len(bounds) == count
    for n in num_tokens:
        for i, bound in enumerate(bounds):
            own = n * (i + 1) // count - n * i // count
            assert max(own * (rank + 1) // tp - own * rank // tp for rank in range(tp)) <= bound
