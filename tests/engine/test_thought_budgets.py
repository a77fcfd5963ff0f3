"""Reasoning ends with the closing tokens when its budget is used, however the engine computes."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.core_submits import core_submit

from moiety_engine.config import Overlap
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.sampling.thought_budget import ThoughtLimit, limits_thoughts, thought_limit
from moiety_engine.server.validation import MAX_BUDGET_IDS, ModelLimits, find_refusal
from moiety_engine.thought_scan import ThoughtScan
from moiety_wire.classes import BATCH, STANDARD
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling, Stopping, Submit
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET, ThoughtBudget
from moiety_wire.trace_events import EventKind

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
    submit = core_submit(
        key,
        [17, 230, 41] * 6,
        NUM,
        service=BATCH,
        sampling=Sampling(**{"logit_bias": bias or {}, **KINDS[key % len(KINDS)]}),
        thought_budget=budget,
    )
    return msgspec.structs.replace(submit, **more)


def budget_of(num_tokens: int, *opener_ids: int) -> ThoughtBudget:
    return ThoughtBudget(num_tokens, opener_ids, CLOSERS, CLOSING)


def mixed() -> list[CoreSubmit]:
    """Return requests with budgets of many sizes; some end their reasoning themselves and some do not reason."""
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


def test_white_space_before_the_opener_does_not_count_and_is_no_way_around_the_budget(loops: Any) -> None:
    for spaces in ([50], [50, 60, 50]):
        budget = msgspec.structs.replace(budget_of(4, OPENER), space_ids=(50, 60))
        begun = asked(0, budget, resumed_ids=[*spaces, OPENER])
        tokens = ids_of(loops.make(overlap=Overlap.ON), [begun])[0]
        assert tokens[4:7] == list(CLOSING) and not set(tokens[:4]) & set(CLOSERS)
        without = msgspec.structs.replace(begun, thought_budget=budget_of(4, OPENER))
        assert ids_of(loops.make(), [without])[0][4:7] != list(CLOSING), "other tokens before it are an answer"


# ── reasoning that begins again ──

AGAIN, CHANNEL, ANALYSIS, FINAL, MESSAGE = 70, 17, 41, 42, 43


def repeated_budget(num_tokens: int) -> ThoughtBudget:
    return ThoughtBudget(num_tokens, (CHANNEL, ANALYSIS, MESSAGE), CLOSERS, (230, AGAIN), reopener_ids=(AGAIN,))


def stretches_of(output: list[int]) -> list[int]:
    """Return the number of tokens of each stretch of reasoning, read plainly from the output."""
    found: list[int] = []
    header: list[int] | None = []
    count: int | None = None
    for token in output:
        if count is not None:
            count += 1
            if token in CLOSERS:
                found, count = [*found, count - 1], None
        elif token == AGAIN or (header is None and token == CHANNEL):
            header = [token]
        elif header is not None and token == MESSAGE:
            count = 0 if (CHANNEL, ANALYSIS) in itertools.pairwise(header) else None
            header = None
        elif header is not None:
            header.append(token)
    return found if count is None else [*found, count]


class PlainRow:
    """A row of which all tokens but the previous one are known."""

    pending = False
    pending_row = 0

    def __init__(self, output: list[int], budget: ThoughtBudget, *, is_pending: bool) -> None:
        self.num_output = len(output)
        self.known_output = output[: max(len(output) - is_pending, 0)]
        self.request: Any = SimpleNamespace(submit=SimpleNamespace(thought_budget=budget))
        self.thought_scan = ThoughtScan(budget).after(self.known_output[: max(len(output) - 1, 0)])


@pytest.mark.parametrize("seed", range(60))
def test_all_stretches_of_reasoning_share_one_budget(seed: int) -> None:
    draw, budget = random.Random(seed), repeated_budget(2 + seed % 17)
    words = [AGAIN, AGAIN, CHANNEL, CHANNEL, ANALYSIS, ANALYSIS, MESSAGE, MESSAGE, FINAL, 50, 230]
    output = [CHANNEL, ANALYSIS, MESSAGE] if seed % 4 else []
    scan = ThoughtScan(budget)
    while len(output) < 160:
        row, late = (PlainRow(output, budget, is_pending=one) for one in (False, True))
        limit = thought_limit(row)
        assert thought_limit(late) == limit, "the previous token does not matter"
        assert limits_thoughts(row) == (limit != ThoughtLimit())
        scan.advance([5, *output], 1, max(len(output), 1))
        assert vars(scan) == vars(row.thought_scan), "a scan in parts is that of the whole"
        since = next((at for at in range(len(output), 0, -1) if output[at - 1] == AGAIN), 0)
        banned = {*limit.banned, *([CHANNEL] if MESSAGE in output[since:] else [])}
        allowed = [word for word in words if word not in banned]
        output.append(draw.choice(allowed) if limit.forced is None else limit.forced)
    counts = stretches_of(output)
    assert sum(counts) <= budget.max_tokens
    assert len(counts) < 2 or sum(max(one, 3) for one in counts[:-1]) <= budget.max_tokens - MIN_THOUGHT_BUDGET


@pytest.mark.parametrize(
    "header",
    [
        [CHANNEL, ANALYSIS, MESSAGE],
        [CHANNEL, ANALYSIS, 50, 60, MESSAGE],
        [50, 60, CHANNEL, ANALYSIS, MESSAGE],
        [50, 60, CHANNEL, ANALYSIS, 50, MESSAGE],
    ],
)
def test_a_header_with_the_channel_begins_reasoning_whatever_is_around_it(header: list[int]) -> None:
    output, budget = [*header, 60, 60, 60, 60, 230, AGAIN, *header, 60], repeated_budget(6)
    assert thought_limit(PlainRow(output, budget, is_pending=False)) == ThoughtLimit(banned=CLOSERS)
    used = [*header, *[60] * 5, 230, AGAIN]
    for at in range(1, len(header) - 1):
        if header[at : at + 1] == [ANALYSIS]:
            row = PlainRow([*used, *header[:at]], budget, is_pending=False)
            assert ANALYSIS in thought_limit(row).banned


def test_empty_stretches_use_the_budget() -> None:
    empty = [CHANNEL, ANALYSIS, MESSAGE, 230, AGAIN]
    for count, banned in ((1, ()), (2, (ANALYSIS,)), (5, (ANALYSIS,))):
        row = PlainRow([*empty * count, 50], repeated_budget(7), is_pending=False)
        assert thought_limit(row) == ThoughtLimit(banned=banned)


def test_a_name_after_another_channel_and_content_are_free() -> None:
    used = [CHANNEL, ANALYSIS, MESSAGE, *[60] * 5, 230, AGAIN, CHANNEL, FINAL, 50]
    assert ANALYSIS not in thought_limit(PlainRow(used, repeated_budget(6), is_pending=False)).banned
    content = [*used, MESSAGE, 50, 50]
    assert not limits_thoughts(PlainRow(content, repeated_budget(6), is_pending=False))


def test_reasoning_that_begins_after_something_else_is_limited_too() -> None:
    before = [50, 230, AGAIN, CHANNEL, ANALYSIS, MESSAGE, 60, 60]
    for budget, expected in ((repeated_budget(2), ThoughtLimit(230)), (repeated_budget(4), ThoughtLimit())):
        assert thought_limit(PlainRow(before, budget, is_pending=False)) == expected
    alone = msgspec.structs.replace(repeated_budget(2), reopener_ids=())
    assert thought_limit(PlainRow(before, alone, is_pending=False)) == ThoughtLimit()


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_an_engine_keeps_the_budget_over_all_stretches(loops: Any, drafting: Any, overlap: Overlap) -> None:
    opener = [CHANNEL, ANALYSIS, MESSAGE]
    budget, again = repeated_budget(6), [*opener, 50, 230, AGAIN, *opener]
    submits = [asked(key, budget, bias={50: 30.0, 60: 30.0}, resumed_ids=again) for key in range(6)]
    found = ids_of(loops.make(overlap=overlap), submits)
    for ids in found.values():
        assert set(ids[:3]) <= {50, 60} and ids[3:5] == [230, AGAIN], "the stretch before counts its opener's length"
    assert ids_of(drafting(overlap=overlap), submits) == found
    used = [*opener, 50, 50, 50, 50, 50, 50, 230, AGAIN]
    submits = [asked(key, budget, bias={CHANNEL: 60.0, ANALYSIS: 70.0}, resumed_ids=used) for key in range(6)]
    found = ids_of(loops.make(overlap=overlap), submits)
    assert all((CHANNEL, ANALYSIS) not in itertools.pairwise(ids) for ids in found.values())
    assert ids_of(drafting(overlap=overlap), submits) == found
    free = ids_of(loops.make(), [msgspec.structs.replace(one, thought_budget=None) for one in submits])
    assert all(ids[1] == ANALYSIS for ids in free.values())


LIMITS = ModelLimits("m", 100, 320, 5, (2,), makes_embeddings=False)


@pytest.mark.parametrize(
    ("budget", "complaint"),
    [
        (budget_of(2), None),
        (budget_of(1), "at least 2 tokens"),
        (ThoughtBudget(9, (), (), CLOSING), "needs closer_ids"),
        (ThoughtBudget(9, (), CLOSERS, ()), "needs closer_ids"),
        (ThoughtBudget(9, (), CLOSERS, (5,) * MAX_BUDGET_IDS), f"at most {MAX_BUDGET_IDS} ids"),
        (ThoughtBudget(9, (), CLOSERS, CLOSING, space_ids=(5,) * MAX_BUDGET_IDS), f"at most {MAX_BUDGET_IDS} ids"),
        (ThoughtBudget(9, (), CLOSERS, CLOSING, reopener_ids=(320,)), "outside the model's vocabulary"),
        (ThoughtBudget(9, (1, 2), CLOSERS, CLOSING, reopener_ids=(3,)), "needs at least 3 opener_ids"),
        (ThoughtBudget(9, (320,), CLOSERS, CLOSING), "outside the model's vocabulary"),
        (ThoughtBudget(9, (), (-1,), CLOSING), "outside the model's vocabulary"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(budget: ThoughtBudget, complaint: str | None) -> None:
    stopping = Stopping(10, thought_budget=budget)
    refusal = find_refusal(Submit("r", 0, "m", "t", STANDARD, [1], Sampling(), stopping, 1, b"", 0), LIMITS)
    assert complaint is None if refusal is None else complaint is not None and complaint in refusal.message
