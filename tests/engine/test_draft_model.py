"""A draft model proposes what the model generates where both agree, drafts only if it pays, and recomputes lost KV."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.config import EngineConfig, Overlap, Speculate
from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_engine.scheduling.speculative_decoding.costs import MAX_BEHIND, DraftCost, PassCosts
from moiety_engine.scheduling.speculative_decoding.draft_model_proposer import DraftModelProposer
from moiety_engine.scheduling.speculative_decoding.drafted_kv import DraftedKv
from moiety_engine.scheduling.speculative_decoding.proposal import Proposal
from moiety_engine.sequence import Sequence
from moiety_engine.startup import load_loop
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import Batching, LoadFormat
from moiety_wire.messages import Sampling

KINDS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, seed=4),
    Sampling(temperature=0.8, top_k=5, min_p=0.05, seed=5, num_logprobs=1),
]


def make_submit(key: int, *, num_prompt: int = 20, max_tokens: int = 41, **more: Any) -> CoreSubmit:
    prompt = [3 + (key * 31 + i * 7) % 300 for i in range(num_prompt)]
    sampling = KINDS[key % len(KINDS)]
    submit = CoreSubmit(key, "t", BATCH, prompt, sampling, max_tokens, 0, [], max_tokens, b"s", 0)
    return msgspec.structs.replace(submit, **more)


def tokens_of(results: dict[int, Result]) -> dict[int, list[int]]:
    return {key: result.token_ids for key, result in results.items()}


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_a_model_that_drafts_for_itself_is_always_right_at_any_temperature(
    loops: Any, draft_by: Any, overlap: Overlap
) -> None:
    submits = [make_submit(key) for key in range(4)]
    expected = tokens_of(run_all(loops.make(), submits))
    loop = draft_by(loops, overlap=overlap)
    assert tokens_of(run_all(loop, submits)) == expected
    load = loop.load()
    assert load.accepted_tokens_total == load.drafted_tokens_total > 4 * 25
    assert loop.steps_total < 30


def test_a_long_prompt_is_taken_in_piece_by_piece_and_once(loops: Any, draft_by: Any) -> None:
    submit = make_submit(0, num_prompt=MAX_BEHIND + 100)
    expected = tokens_of(run_all(loops.make(), [submit]))
    loop = draft_by(loops)
    assert tokens_of(run_all(loop, [submit])) == expected
    first = loop.steps_total
    assert loop.load().accepted_tokens_total == loop.load().drafted_tokens_total > 0
    again = msgspec.structs.replace(submit, key=1)
    assert tokens_of(run_all(loop, [again])) == {1: expected[0]}
    assert loop.steps_total - first < first, "what the first request left in the cache was taken in once more"


def test_answers_continue_without_drafts_beyond_the_draft_models_context(
    loops: Any, sketch_loops: Any, draft_by: Any
) -> None:
    submit = make_submit(0, num_prompt=sketch_loops.model.spec.max_context_tokens - 20)
    expected = tokens_of(run_all(loops.make(), [submit]))
    loop = draft_by(sketch_loops)
    assert tokens_of(run_all(loop, [submit])) == expected
    assert loop.load().output_tokens_total == 20


def test_both_models_give_their_memory_back_asleep_and_draft_on_when_woken(checkpoint: Path) -> None:
    folder = str(checkpoint)
    config = EngineConfig(
        model=folder, name="t", device="cpu", dtype="float32", speculate=Speculate.DRAFT, draft_model=folder
    )
    ticks = count(10**18, 10**7)
    loop = load_loop(config, clock_ns=lambda: next(ticks))
    before = tokens_of(run_all(loop, [make_submit(0)]))
    draft = loop.executor.draft
    assert draft is not None and draft._passes._kvs
    cache = weakref.ref(draft._passes._kvs[0].layers[0].parts[0])
    loop.sleep()
    gc.collect()
    assert loop.executor.model.is_offloaded and draft.model.is_offloaded
    assert cache() is None, "somebody still holds the draft's cache"
    loop.wake()
    assert not draft.model.is_offloaded
    draft.proposer.passes.measured([])  # by this clock each step takes the same time
    drafted = loop.load().drafted_tokens_total
    assert tokens_of(run_all(loop, [make_submit(0)])) == before
    assert loop.load().accepted_tokens_total == loop.load().drafted_tokens_total > drafted > 0


# ── what cannot be ──


def test_a_draft_model_with_other_tokens_is_refused_with_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    settings: dict[str, Any] = {
        "name": "t",
        "dtype": "float32",
        "load_format": LoadFormat.DUMMY,
        "speculate": Speculate.DRAFT,
    }
    with pytest.raises(InvalidConfig, match=r"has 300 tokens in its vocabulary and the model 320.*--speculate ngram"):
        load_loop(EngineConfig(model=str(checkpoint), draft_model=str(other), **settings))
    both = [tmp_path / name for name in ("one", "two")]
    for folder, last in zip(both, ("c", "x"), strict=True):
        shutil.copytree(checkpoint, folder)
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, last: 2}, "unk_token": "a"}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    with pytest.raises(InvalidConfig, match=r"token 2 is .* --draft-model of the same family"):
        load_loop(EngineConfig(model=str(both[0]), draft_model=str(both[1]), **settings))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"speculate": Speculate.DRAFT}, "needs --draft-model"),
        ({"draft_model": "d"}, "--draft-model needs --speculate draft"),
        ({"speculate": Speculate.MTP, "pp": 2}, "mtp is not available with --pp.*--speculate draft"),
        ({"speculate": Speculate.MTP, "draft_model": "d"}, "--draft-model needs --speculate draft"),
        ({"speculate": Speculate.DRAFT, "draft_model": "d", "batching": Batching.PADDED}, "--speculate off"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], advice: str) -> None:
    with pytest.raises(InvalidConfig, match=advice):
        EngineConfig(model="m", name="m", **settings)


# ── what is there, and what pays ──


def make_sequence(tokens: list[int], blocks: list[int], salt: bytes = b"s") -> Sequence:
    submit = CoreSubmit(0, "t", BATCH, tokens, Sampling(), 50, 0, [], 50, salt, 0)
    sequence = Sequence(submit, order=0, seed=0)
    sequence.kv.blocks = blocks
    return sequence


def test_blocks_are_known_by_what_the_draft_model_wrote_into_them_last() -> None:
    held = DraftedKv(block_size=2)
    one = make_sequence([1, 2, 3, 4, 5], [7, 8, 9])
    assert held.num_there(one) == 0
    held.record_computed(one, 0, 5, [6, 9])
    one.tokens += [6, 8]  # one of two draft tokens was accepted
    one.kv.blocks.append(3)
    assert held.num_there(one) == 6
    assert held.num_there(make_sequence([1, 2, 3, 4, 5], [7, 8, 2])) == 4
    assert held.num_there(make_sequence([1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 2])) == 6
    assert held.num_there(make_sequence([1, 2, 3, 4], [7, 8])) == 3, "the newest token is always taken in"
    assert held.num_there(make_sequence([1, 2, 3, 4, 5], [7, 5, 9])) == 2
    assert held.num_there(make_sequence([1, 2, 3, 4, 5], [7, 8, 9], salt=b"another tenant")) == 0
    other = make_sequence([1, 2, 9, 9], [7, 8])
    assert held.num_there(other) == 2
    held.record_computed(other, 2, 3, [])  # half of a block that held other tokens
    assert held.num_there(make_sequence([1, 2, 3, 4, 5], [7, 8, 9])) == 2
    held.forget()
    assert held.num_there(one) == 0


def test_passes_cost_by_their_rows_and_what_was_missed_counts_little_by_little() -> None:
    costs = PassCosts()
    assert DraftCost(costs, [Proposal([1], num_behind=1)]).seconds == 0
    costs.measured([0.01, 0.02, 0.03])
    draft_cost = DraftCost(costs, [Proposal([-1] * 2, num_behind=1), Proposal([-1], num_behind=9, num_left=10)])
    draft_cost.add(0, 0)
    draft_cost.add(0, 1)
    assert draft_cost.seconds == pytest.approx(0.02) == draft_cost.counted_s
    draft_cost.add(1, 0)
    behind_s = 0.03 * 9 / 4 - 0.01
    assert draft_cost.seconds == pytest.approx(0.03 + behind_s)
    assert draft_cost.counted_s == pytest.approx(0.03 + behind_s / 10)
    for _ in range(100):
        costs.expect(costs.seconds(1))
        costs.record_seconds(0.005)
    assert costs.take_s() == pytest.approx(0.5)
    assert costs.seconds(2) == pytest.approx(0.01, rel=0.1)


def test_a_draft_model_that_is_wrong_is_tried_ever_more_rarely_and_trusted_again_when_right() -> None:
    proposer = DraftModelProposer(DraftedKv(4), max_context=512)
    sequence = make_sequence([1] * 9, [0, 1, 2])

    def looks_until_tried() -> int:
        for number in range(1, 10_000):
            if proposer.attempt([sequence], [proposer.propose(sequence, 7)]) is not None:
                return number
        raise AssertionError("it is never tried again")

    pauses = []
    for _ in range(8):
        pauses.append(looks_until_tried())
        proposer.verified(sequence, 0, one_wrong=True)
    assert pauses[:4] == [1, 4, 16, 64]
    assert pauses[-2:] == [4096, 4096]
    assert proposer.propose(sequence, 7).acceptance < 0.1
    looks_until_tried()
    for _ in range(8):
        proposer.verified(sequence, 3, one_wrong=False)
    assert proposer.propose(sequence, 7).acceptance > 0.6


def test_a_draft_model_that_is_too_slow_is_not_asked(loops: Any, draft_by: Any) -> None:
    loop = draft_by(loops)
    speculator = loop.scheduler.speculator
    assert speculator is not None
    speculator.costs.measured([0.01] * 4)
    assert loop.executor.draft is not None
    loop.executor.draft.proposer.passes.measured([0.2] * 4)
    submits = [make_submit(0), make_submit(1)]
    assert tokens_of(run_all(loop, submits)) == tokens_of(run_all(loops.make(), submits))
    assert loop.load().drafted_tokens_total == 0
