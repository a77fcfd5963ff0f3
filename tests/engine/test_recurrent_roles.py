"""Roles and drafts of another model with each kind of recurrent layer: answers are those of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moiety_engine.config import KvTransport
from moiety_engine.offline import run_all
from moiety_wire.messages import Sampling

from .conftest import Loops, make_drafting
from .test_kv_transfer import asked, pairs_of

KINDS = {  # a variant with each kind of recurrent layer
    "gated DeltaNet": "qwen3_next",
    "Kimi Delta Attention": "kimi_linear",
    "lightning attention": "minimax",
    "Mamba": "jamba",
    "Mamba-2": "nemotron_h",
    "short convolution": "lfm2_moe",
}
TWO_WORDS = {17: 31.0, 230: 30.0}  # biases, so that two models say the same most of the time


def loops_of(folder: Path, variant: str) -> Loops:
    from tests.model.conftest import write_checkpoint

    write_checkpoint(folder, variant)
    return Loops(folder)


@pytest.fixture(scope="module", params=list(KINDS))
def of_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return loops_of(tmp_path_factory.mktemp("kind"), KINDS[request.param])


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return loops_of(tmp_path_factory.mktemp("draft"), "granite")


@pytest.fixture(scope="module", params=["deepseek_v4", "zaya"])
def entries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Layers with entries in blocks, of several tokens or keys and values, beside a state."""
    return loops_of(tmp_path_factory.mktemp("entries"), request.param)


@pytest.fixture
def pairs(of_kind: Loops) -> Iterator[Any]:
    yield from pairs_of(of_kind)


def test_two_engines_of_different_roles_answer_as_one(of_kind: Loops, pairs: Any) -> None:
    requests = [asked(1), asked(2, 33), asked(3, 50)]
    pair = pairs()
    pair.run(requests)
    assert pair.tokens == {key: one.token_ids for key, one in run_all(of_kind.make(), requests).items()}
    assert all(end.arrival.num_bytes > 0 and not end.num_recomputed_tokens for end in pair.ends.values())


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        (KvTransport.MEMORY, {"block_size": 8}),
        (KvTransport.TCP, {"block_size": 64}),
        (KvTransport.TCP, {"max_running": 1}),
    ],
    ids=str,
)
def test_entries_beside_states_are_sent_to_blocks_of_another_size(
    entries: Loops, way: KvTransport, settings: dict[str, Any]
) -> None:
    requests = [asked(1, 3), asked(2, 32), asked(3, 67), asked(4, 140), asked(5, 140)]
    made = pairs_of(entries)
    pair = next(made)(way=way, **settings)
    pair.run(requests)
    assert pair.tokens == {key: one.token_ids for key, one in run_all(entries.make(), requests).items()}
    assert all(end.arrival.num_bytes > 0 and not end.num_recomputed_tokens for end in pair.ends.values())
    assert not list(made)


def test_drafts_of_another_model_change_no_answer(of_kind: Loops, draft: Loops) -> None:
    sampling = Sampling(temperature=0.0, logit_bias=TWO_WORDS)
    requests = [asked(key, 20 + key, sampling=sampling, max_tokens=40, credit_tokens=40) for key in range(6)]
    loop = make_drafting(of_kind, draft, max_running=4)
    found = {key: one.token_ids for key, one in run_all(loop, requests).items()}
    assert found == {key: one.token_ids for key, one in run_all(of_kind.make(max_running=4), requests).items()}
    load = loop.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total
