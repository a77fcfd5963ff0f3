"""Credits in the books: one ledger entry each, in the transaction of the charge, so that all sums stay equal."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import delete, select, update
from sqlalchemy.exc import IntegrityError
from tests.usage_rows import NOON, make_row

from moiety_platform.db.session import Database
from moiety_platform.prices.token_cost import Price
from moiety_platform.quotes.calibration import MAX_MARGINS, MET_FRACTION, MIN_MARGINS, QuoteCalibration
from moiety_platform.quotes.guarantee import (
    CreditReason,
    GuaranteeOutcome,
    SequenceTimes,
    judge_guarantee,
    needed_margin,
)
from moiety_platform.quotes.prediction import expected_output_tokens, guarantee_of, predict_timing
from moiety_platform.quotes.quote import Quote
from moiety_platform.quotes.timing import Timing
from moiety_platform.usage.ledger_entries import correct
from moiety_platform.usage.models import EntryKind, LedgerEntry, UsageCut, UsageRecord
from moiety_platform.usage.purge import purge_requests
from moiety_platform.usage.reconciliation import Reconciliation, reconcile
from moiety_platform.usage.row import KILLED, UsageRow
from moiety_platform.usage.store import insert_rows
from moiety_wire.engine_load import ClassLoad, Load, StepCosts

PRICE = Price(1, 1, 1)
GUARANTEE = Timing(1.0, 0.1)


def credited_row(request_id: str, cost: int = 75, credit: int = 25) -> UsageRow:
    return make_row(
        request_id,
        cost_nanodollars=cost,
        credit_nanodollars=credit,
        credit_reason="ttft",
        guarantee_met=False,
        predicted_ttft_ms=5.0,
        predicted_duration_ms=9.0,
    )


async def compared(database: Database) -> Reconciliation:
    async with database.read() as session:
        return await reconcile(session, NOON - timedelta(minutes=5), NOON + timedelta(minutes=5))


async def entries(database: Database, request_id: str) -> dict[str, int]:
    async with database.read() as session:
        found = await session.scalars(select(LedgerEntry).where(LedgerEntry.request_id == request_id))
        return {entry.kind: entry.cost_nanodollars for entry in found}


async def test_a_credit_is_an_entry_of_its_own_and_repeated_rows_add_none(database: Database) -> None:
    rows = [credited_row("a"), make_row("b", cost_nanodollars=30, guarantee_met=True)]
    for _ in range(2):
        async with database.write() as session:
            await insert_rows(session, rows)
    assert await entries(database, "a") == {EntryKind.SETTLED: 100, EntryKind.CREDITED: -25}
    assert await entries(database, "b") == {EntryKind.SETTLED: 30}
    found = await compared(database)
    assert found.agrees
    assert (found.total.requests, found.total.cost_nanodollars, found.total.credit_nanodollars) == (2, 105, 25)


@pytest.mark.parametrize(
    "damage",
    [
        delete(LedgerEntry).where(LedgerEntry.kind == EntryKind.CREDITED),
        update(LedgerEntry).where(LedgerEntry.kind == EntryKind.CREDITED).values(kind=EntryKind.CORRECTED.value),
        update(UsageRecord).values(credit_nanodollars=0),
    ],
)
async def test_reconciliation_notices_a_missing_credit(database: Database, damage: Any) -> None:
    async with database.write() as session:
        await insert_rows(session, [credited_row("a")])
        await session.execute(damage)
    assert not (await compared(database)).agrees


async def test_a_gateway_taken_for_dead_brings_its_credit_once(database: Database) -> None:
    """Its row as killed is stored first, from the log of running requests, and its own row later."""
    final = credited_row("a")
    killed = msgspec.structs.replace(
        make_row("a", cost_nanodollars=40),
        **{name: value for name, value in KILLED.items() if name != "cost_nanodollars"},
    )
    for rows in ([killed], [final], [final]):
        async with database.write() as session:
            await insert_rows(session, rows)
    assert await entries(database, "a") == {
        EntryKind.SETTLED: 40, EntryKind.CORRECTED: 60, EntryKind.CREDITED: -25,
    }  # fmt: skip
    assert (await compared(database)).agrees
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            await correct(session, EntryKind.METERED, 1, msgspec.structs.replace(final, credit_nanodollars=0), final)


async def test_credits_of_deleted_requests_stay_in_the_sums(database: Database) -> None:
    async with database.write() as session:
        await insert_rows(session, [credited_row("a"), credited_row("b", cost=1, credit=9)])
        assert await purge_requests(session, NOON + timedelta(hours=1)) == 2
    async with database.read() as session:
        assert list(await session.scalars(select(UsageCut.credit_nanodollars))) == [34]
    assert (await compared(database)).agrees


def quote(percent: int = 50, guarantee: Timing | None = GUARANTEE) -> Quote:
    return Quote(
        b"q",
        "ten_a",
        "/v1",
        b"",
        "demo",
        "standard",
        0,
        10,
        7,
        {"standard": Price(1, 1, 1)},
        percent,
        guarantee,
        guarantee,
    )


def judged(
    *times: SequenceTimes, cost: int = 101, completed: bool = True, failed: bool = False, paused: bool = False
) -> GuaranteeOutcome:
    return judge_guarantee(quote(), times, cost, has_completed=completed, has_failed=failed, was_paused=paused)


@pytest.mark.parametrize(
    ("times", "paused", "reason"),
    [
        ((SequenceTimes(5, 1.0, 1.4),), False, None),
        ((SequenceTimes(5, 1.01, 1.4),), False, CreditReason.TTFT),
        ((SequenceTimes(5, 0.5, 1.45),), False, CreditReason.FINISH),
        ((SequenceTimes(5, 0.5, 1.45),), True, None),
        ((SequenceTimes(5, 0.5, 1.4), SequenceTimes(1, 0.5, 1.01)), False, CreditReason.FINISH),
        ((SequenceTimes(0, 0.5, 0.6),), False, None),
    ],
)
def test_a_guarantee_is_missed_by_a_late_first_or_last_token(
    times: tuple[SequenceTimes, ...], paused: bool, reason: CreditReason | None
) -> None:
    outcome = judged(*times, paused=paused)
    assert (outcome.is_met, outcome.reason) == (reason is None, reason)
    assert outcome.credit_nanodollars == (0 if reason is None else 50)


def test_refused_and_cancelled_requests_have_no_guarantee_and_failed_ones_break_it() -> None:
    late = SequenceTimes(5, 9.0, 9.0)
    assert judged(late, completed=False).is_met is None
    assert judged(late, completed=False).credit_nanodollars == 0
    failed = judged(late, completed=False, failed=True)
    assert (failed.is_met, failed.reason, failed.predicted_ttft_ms) == (False, CreditReason.FAILED, None)
    without = judge_guarantee(quote(100, None), [late], 10, has_completed=True, has_failed=False, was_paused=False)
    assert (without.is_met, without.credit_nanodollars) == (None, 0)


@given(st.integers(0, 10**15), st.integers(0, 100))
def test_a_credit_is_never_more_than_the_cost(cost: int, percent: int) -> None:
    late = [SequenceTimes(1, 9.0, 9.0)]
    outcome = judge_guarantee(quote(percent), late, cost, has_completed=True, has_failed=False, was_paused=False)
    assert 0 <= outcome.credit_nanodollars <= cost * percent / 100 <= cost


COSTS = StepCosts(0.01, 0.001, ((4, 0.002),), 1e-6, 1e-7, 0.05, 0.02)


def load(**fields: Any) -> Load:
    usual: dict[str, Any] = {
        "engine_id": "e", "seq": 0, "num_running": 2, "num_waiting": 0, "num_paused": 0, "kv_blocks_total": 100,
        "kv_blocks_used": 10, "kv_blocks_cached": 0, "block_size": 16, "steps_total": 0, "prompt_tokens_total": 0,
        "cached_tokens_total": 0, "output_tokens_total": 30, "requests_total": 4, "step_costs": COSTS,
        "max_batch_tokens": 12,
    }  # fmt: skip
    return Load(**{**usual, **fields})


def test_a_prediction_adds_the_queue_the_prompts_steps_and_the_step_of_a_token() -> None:
    waiting = ClassLoad("standard", 1, 0, 3.0, 0, {}, 0, {}, 0, 0, 0)
    context_s = 160 * 1e-6
    step_s = 0.01 + 12 * 0.001 + 8 * 0.002 + 0.02 + context_s  # of 2 running rows and 10 of the prompt
    found = predict_timing(load(), waiting, [20], 1)
    assert found is not None
    assert found.first_token_s == pytest.approx(3.0 + 2 * step_s + 200 * 1e-7)
    assert found.token_s == pytest.approx(0.01 + 3 * 0.001 + context_s + 20 * 1e-6)
    assert found.finish_s(3) == pytest.approx(found.first_token_s + 2 * found.token_s)
    assert predict_timing(load(step_costs=None), waiting, [20], 1) is None


@given(st.integers(1, 10_000), st.integers(1, 64), st.integers(0, 200))
def test_more_work_is_never_predicted_sooner(num_tokens: int, num_sequences: int, num_running: int) -> None:
    busy = load(num_running=num_running, max_batch_tokens=512)
    less, more = (predict_timing(busy, None, [n], num_sequences) for n in (num_tokens, num_tokens + 1))
    assert less is not None and more is not None
    assert less.first_token_s <= more.first_token_s + 0.0021  # a last step may be shorter
    guarantee = guarantee_of(less, 0.5)
    assert guarantee.first_token_s > less.first_token_s and guarantee.token_s >= less.token_s


def test_the_expected_output_is_the_mean_so_far_and_at_most_the_maximum() -> None:
    assert expected_output_tokens([load(), load()], 100) == 8
    assert expected_output_tokens([load()], 5) == 5
    assert expected_output_tokens([load(requests_total=0)], 5) == 5


@given(st.floats(0.2, 15), st.floats(0.2, 15))
def test_predictions_follow_the_times_that_requests_take(first: float, token: float) -> None:
    calibration, computed = QuoteCalibration(), Timing(0.5, 0.01)
    assert calibration.corrected("m", "flex", computed) == computed
    for _ in range(100):
        calibration.observe("m", "flex", computed, 0.5 * first, 0.01 * token)
    found = calibration.corrected("m", "flex", computed)
    assert found.first_token_s == pytest.approx(0.5 * first, rel=0.01)
    assert found.token_s == pytest.approx(0.01 * token, rel=0.01)
    for other in ("other", "flex"), ("m", "standard"):
        assert calibration.corrected(*other, computed) == computed


def test_one_outlier_moves_a_factor_little_and_a_single_token_says_nothing_of_the_pace() -> None:
    calibration, computed = QuoteCalibration(), Timing(0.5, 0.01)
    calibration.observe("m", "flex", computed, 1e9, None)
    found = calibration.corrected("m", "flex", computed)
    assert 0.5 < found.first_token_s < 0.7 and found.token_s == 0.01


@given(st.lists(st.floats(-1, 1000), max_size=300), st.floats(0, 2))
def test_the_learned_margin_meets_nearly_all_recent_guarantees_and_is_never_below_the_least(
    needed: list[float], least: float
) -> None:
    calibration = QuoteCalibration()
    for one in needed:
        calibration.observe_margin("m", "flex", one)
    margin, recent = calibration.margin("m", "flex", least), needed[-MAX_MARGINS:]
    assert margin >= least
    if len(recent) < MIN_MARGINS:
        assert margin == least
    else:
        assert sum(one <= margin for one in recent) >= MET_FRACTION * len(recent)
        assert margin in (least, *recent), "no larger than needed"
    assert calibration.margin("m", "standard", least) == least


@given(
    st.builds(Timing, st.floats(0.01, 5), st.floats(0.001, 0.5)),
    st.lists(st.builds(SequenceTimes, st.integers(1, 50), st.floats(0, 20), st.floats(0, 40)), min_size=1, max_size=3),
)
def test_the_needed_margin_is_the_least_with_which_the_guarantee_is_met(
    prediction: Timing, sequences: list[SequenceTimes]
) -> None:
    def meets(margin: float) -> bool:
        terms = msgspec.structs.replace(quote(), guarantee=guarantee_of(prediction, margin))
        ended: dict[str, Any] = {"has_completed": True, "has_failed": False, "was_paused": False}
        return bool(judge_guarantee(terms, sequences, 100, **ended).is_met)

    needed = needed_margin(prediction, sequences)
    assert meets(needed + 1e-6)
    assert not meets(needed - 1e-6)
