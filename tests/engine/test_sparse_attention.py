"""Index keys move with the blocks of latent rows: sparse attention gives the same answers wherever its blocks were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.families import read_spec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.offline import run_all
from moiety_engine.planning.models import find_model

from .conftest import make_drafting
from .disk_tiers import Make, evict, make_submit, num_cached, run
from .test_kv_transfer import asked, pairs_of
from .test_preemption import FREE, LONG, make_engine, squeeze, tokens_with_room


@pytest.fixture(scope="module")
def alone(sparse_loops: Any) -> dict[int, list[int]]:
    return tokens_with_room(sparse_loops, LONG)


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_preempted_requests_get_the_tokens_of_an_undisturbed_run(
    sparse_loops: Any, alone: dict[int, list[int]], host_blocks: int
) -> None:
    engine = make_engine(sparse_loops, 28, host_blocks=host_blocks, prefix_caching=host_blocks > 0)
    engine.loop.scheduler.swap_costs(FREE)
    squeeze(engine)
    assert {key: engine.tokens[key] for key in alone} == alone
    recomputed = sum(finish.num_recomputed_tokens for finish in engine.finishes.values())
    assert (recomputed > 0) == (host_blocks == 0)
    assert (engine.loop.load().swapped_in_blocks_total > 0) == (host_blocks > 0)
    engine.assert_nothing_is_held()


def test_evicted_blocks_come_back_from_the_disk(sparse_loops: Any, tmp_path: Path) -> None:
    make = Make(sparse_loops, tmp_path / "kv")
    try:
        loop = make()
        first = run(loop, make_submit(1))
        evict(loop)
        again = run(loop, make_submit(1))
        assert (num_cached(first), num_cached(again)) == (0, 40)
        assert again.token_ids == first.token_ids
        assert loop.load().disk_restored_blocks_total >= 10
    finally:
        make.end()


@pytest.fixture
def pairs(sparse_loops: Any) -> Iterator[Any]:
    yield from pairs_of(sparse_loops)


def test_blocks_that_another_engine_computed_are_continued(sparse_loops: Any, pairs: Any) -> None:
    requests = [asked(1), asked(2, 33)]
    pair = pairs()
    pair.run(requests)
    assert pair.tokens == {key: one.token_ids for key, one in run_all(sparse_loops.make(), requests).items()}
    assert all(end.arrival.num_bytes > 0 for end in pair.ends.values())


def test_drafts_are_verified_with_the_same_selection(
    sparse_loops: Any, sketch_loops: Any, alone: dict[int, list[int]]
) -> None:
    loop = make_drafting(sparse_loops, sketch_loops, speculate_tokens=4, block_size=4)
    greedy = [submit for submit in LONG if submit.sampling.temperature == 0.0]
    found = run_all(loop, greedy)
    assert {key: one.token_ids for key, one in found.items()} == {one.key: alone[one.key] for one in greedy}
    assert loop.load().drafted_tokens_total > 0


def test_a_block_holds_a_row_for_each_layer_and_a_key_for_each_indexer(sparse_loops: Any) -> None:
    values = 3 * 48 + 2 * 32
    assert sparse_loops.model.kv_bytes_per_block(4) == 4 * 4 * values
    served = find_model(str(sparse_loops.folder), "auto", "auto")
    assert served.kv_bytes_per_token(served.spec, 100) == 2 * values
    fp8 = find_model(str(sparse_loops.folder), "auto", "fp8")
    assert fp8.kv_bytes_per_token(fp8.spec, 100) == 3 * 48 + 2 * 2 * 32


def test_a_stage_that_begins_with_a_layer_without_indexer_is_refused(sparse_loops: Any) -> None:
    spec = read_spec(sparse_loops.folder)
    assert len(own_spec(spec, RankPosition(Layout(pp=2), 0)).layers) == 2
    for rank in range(3):
        with pytest.raises(InvalidConfig, match="begins a stage with layer 1, which attends to the tokens"):
            own_spec(spec, RankPosition(Layout(pp=3), rank))
