"""Thoughts end when their budget is used, by the closing tokens, and in the same way however the engine computes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moiety_engine.config import Overlap
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.server.validation import MAX_BUDGET_IDS, ModelLimits, find_refusal
from moiety_wire.classes import BATCH, STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling, Stopping, Submit, ThoughtBudget
from moiety_wire.notes import EventKind

BLOCK_BYTES_8 = 2 * 2 * 2 * 16 * 8 * 4  # layers · (K, V) · heads · width · tokens · float32
OPENER, CLOSERS, CLOSING = 17, (230, 231), (40, 230, 41)
# A bias that leaves the model a few tokens, so that it often opens thoughts and sometimes ends them.
WORDS = {17: 31.0, 41: 30.0, 50: 30.0, 60: 30.0, 230: 28.5, 231: 28.5}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.1},
    {"temperature": 1.2, "seed": 13, "num_logprobs": 2},
    {"temperature": 1.0, "top_k": 4, "seed": 14, "presence_penalty": 0.5},
    {"temperature": 1.5, "seed": 15},
]
NUM = 24


def asked(key: int, budget: ThoughtBudget | None, *, bias: dict[int, float] | None = None, **more: Any) -> CoreSubmit:
    submit = CoreSubmit(
        key=key,
        tenant_id="t",
        service=BATCH,
        prompt_ids=[17, 230, 41] * 6,
        sampling=Sampling(**{"logit_bias": bias or {}, **KINDS[key % len(KINDS)]}),
        max_tokens=NUM,
        min_tokens=0,
        stop_token_ids=[],
        credit_tokens=NUM,
        cache_salt=b"s",
        arrival_unix_ns=0,
        thought_budget=budget,
    )
    return msgspec.structs.replace(submit, **more)


def budget_of(num_tokens: int, *opener_ids: int) -> ThoughtBudget:
    return ThoughtBudget(num_tokens, opener_ids, CLOSERS, CLOSING)


def mixed() -> list[CoreSubmit]:
    """Requests with budgets of many sizes, of which some end their thoughts themselves and some do not think."""
    budgets = [budget_of(2 + key // 2, *([OPENER] if key % 3 else [])) for key in range(30)]
    return [asked(key, budget, bias=WORDS) for key, budget in enumerate(budgets)]


def ids_of(loop: Any, submits: list[CoreSubmit]) -> dict[int, list[int]]:
    return {key: result.token_ids for key, result in run_all(loop, submits).items()}


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_thoughts_end_with_the_closing_tokens_when_their_budget_is_used(loops: Any, overlap: Overlap) -> None:
    free = ids_of(loops.make(overlap=overlap), [asked(key, None) for key in range(6)])
    found = ids_of(loops.make(overlap=overlap), [asked(key, budget_of(7)) for key in range(6)])
    for key in range(6):
        assert not set(free[key][:7]) & set(CLOSERS), "this model does not end its thoughts itself"
        assert found[key][:6] == free[key][:6]
        assert found[key][6] not in CLOSERS
        assert found[key][7:10] == list(CLOSING)
        assert len(found[key]) == NUM


def test_thoughts_that_the_model_ends_and_answers_without_thoughts_are_left_alone(loops: Any) -> None:
    closes = [asked(key, None, bias={230: 1000.0}) for key in range(6)]
    free = ids_of(loops.make(), closes)
    limited = [msgspec.structs.replace(one, thought_budget=budget_of(5)) for one in closes]
    assert ids_of(loops.make(), limited) == free
    thoughtless = [msgspec.structs.replace(one, thought_budget=budget_of(5, OPENER)) for one in closes]
    assert ids_of(loops.make(), thoughtless) == free


def test_a_prefix_that_opens_the_thoughts_does_not_count_to_their_budget(loops: Any) -> None:
    begun = asked(0, budget_of(4, OPENER, 50), resumed_ids=[OPENER, 50])
    tokens = ids_of(loops.make(), [begun])[0]
    assert tokens[4:7] == list(CLOSING)  # the resumed tokens are not repeated here
    assert not set(tokens[:4]) & set(CLOSERS)


def test_the_state_of_a_budget_follows_from_the_tokens_alone(loops: Any, drafting: Any) -> None:
    submits = mixed()
    expected = ids_of(loops.make(), submits)
    ended = [
        key for key, ids in expected.items() if list(CLOSING) == ids[(at := key // 2 + 2 + (key % 3 > 0)) : at + 3]
    ]
    assert 4 < len(ended) < 26, "some budgets are used up and some are not"
    assert ids_of(loops.make(overlap=Overlap.ON), submits) == expected
    assert ids_of(loops.make(batching=Batching.STATIC), submits) == expected
    for overlap in (Overlap.OFF, Overlap.ON):
        assert ids_of(drafting(overlap=overlap), submits) == expected
    for cut in (1, 3, 6, 9, 12):
        rest = [msgspec.structs.replace(one, resumed_ids=expected[one.key][:cut]) for one in submits]
        assert ids_of(loops.make(overlap=Overlap.ON), rest) == {key: ids[cut:] for key, ids in expected.items()}


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_a_preempted_request_keeps_its_budget(loops: Any, overlap: Overlap) -> None:
    submits = mixed()
    expected = ids_of(loops.make(), submits)
    few = {"block_size": 8, "kv_memory_bytes": 15 * BLOCK_BYTES_8, "host_kv_memory_bytes": 0}
    loop = loops.make(overlap=overlap, max_context_tokens=64, **few)
    results = run_all(loop, submits)
    events = [event.kind for result in results.values() if result.finish for event in result.finish.events]
    assert EventKind.PREEMPTED in events
    assert {key: result.token_ids for key, result in results.items()} == expected


LIMITS = ModelLimits("m", 100, 320, 5, (2,), makes_embeddings=False)


@pytest.mark.parametrize(
    ("budget", "complaint"),
    [
        (budget_of(2), None),
        (budget_of(1), "at least 2 tokens"),
        (ThoughtBudget(9, (), (), CLOSING), "needs closer_ids"),
        (ThoughtBudget(9, (), CLOSERS, ()), "needs closer_ids"),
        (ThoughtBudget(9, (), CLOSERS, (5,) * MAX_BUDGET_IDS), f"at most {MAX_BUDGET_IDS} ids"),
        (ThoughtBudget(9, (320,), CLOSERS, CLOSING), "outside the model's vocabulary"),
        (ThoughtBudget(9, (), (-1,), CLOSING), "outside the model's vocabulary"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(budget: ThoughtBudget, complaint: str | None) -> None:
    stopping = Stopping(10, thought_budget=budget)
    refusal = find_refusal(Submit("r", 0, "m", "t", STANDARD, [1], Sampling(), stopping, 1, b"", 0), LIMITS)
    assert complaint is None if refusal is None else complaint is not None and complaint in refusal.message
