"""Checks of a run, from the clients, the usage records and the engines together."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from chaos.load import Asked, Outcome, Tenant
from chaos.stage import NUM_GATEWAYS, Stage

RECOVERY_S = 10.0
ATTAINMENT = 0.99
ENDED_WHOLE = ("stop", "length")
OVERHANG_S = 12.0  # how much longer than its client a request may live that was not answered to its end
HELD_S = 30.0  # how long a gateway keeps what it has drawn of a rate and does not use
Row = Mapping[str, Any]


@dataclass
class Window:
    """One fault: when it began and ended, when the next one began, and when the stage was healthy again."""

    name: str
    begin_s: float
    end_s: float = 0.0
    next_s: float = 0.0
    whole_after_s: float | None = None
    late_s: float = 0.0  # how long the machine had no time for this process, at most, until the next fault
    notes: dict[str, object] = field(default_factory=dict)


def read_rows(url: str, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return all usage rows of some tenants, by their id."""
    names = (
        "request_id, tenant_id, key_id, outcome, http_status, prompt_tokens, output_tokens, error_code, model, endpoint"
    )
    with psycopg.connect(url) as connection:
        found = connection.execute(f"SELECT {names} FROM usage WHERE tenant_id = ANY(%s)", (list(ids),))
        return {row[0]: dict(zip(names.split(", "), row, strict=True)) for row in found}


def read_joins(stage: Stage) -> dict[str, list[str]]:
    """Return the usage rows of each client's request, from the gateways' logs."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for number in range(NUM_GATEWAYS):
        for line in stage.log(("gateway", number)).read_bytes().splitlines():
            if b'"client_request_id"' not in line:
                continue
            try:
                event = json.loads(line)
            except ValueError:
                continue  # its gateway was killed in the midst of it
            if event.get("event") == "request":
                found[event["client_request_id"]].append(event["request_id"])
    return dict(found)


def one_outcome_each(
    asked: Iterable[Asked], rows: Mapping[str, Row], joins: Mapping[str, list[str]], of_batch: Sequence[str]
) -> list[str]:
    """Return the differences between what clients saw and what was booked.

    `of_batch` are the answers' ids in a batch's results.
    """
    wrong, known = [f"{row_id} of the batch is not booked" for row_id in of_batch if row_id not in rows], {*of_batch}
    nameless = 0  # whose rows neither their clients nor a log can name: a killed gateway's
    for one in asked:
        mine = {*joins.get(one.request_id, ()), *([one.answer_id] if one.answer_id else [])}
        known |= mine
        nameless += not mine and one.outcome in (Outcome.CUT, Outcome.NO_ANSWER, Outcome.LEFT)
        booked = [rows[each] for each in mine if each in rows]
        who = f"{one.request_id} ({one.outcome.value} {one.status} {one.code})"
        if len(joins.get(one.request_id, ())) > 1 or len(mine) > 1:
            wrong.append(f"{who} was served more than once: {sorted(mine)}")
        elif len(booked) < len(mine):
            wrong.append(f"{who} is not booked")
        elif one.status == 200 and one.outcome is Outcome.WHOLE and not booked:
            wrong.append(f"{who} was answered and not booked")
        elif one.outcome is Outcome.WHOLE:
            wrong += _whole(one, who, booked[0])
        if one.wrong_text:
            wrong.append(f"{who} got a token twice, or not at all")
        if not one.end_s:
            wrong.append(f"{who} has no end")
    strangers = [row for row_id, row in rows.items() if row_id not in known]
    if len(strangers) > nameless:
        wrong.append(f"{len(strangers)} rows are of requests that no client has sent: {strangers[:3]}")
    return wrong


def _whole(one: Asked, who: str, row: Row) -> list[str]:
    """Return the differences between a complete answer and its row."""
    is_billed = row["outcome"] in ENDED_WHOLE and row["output_tokens"] == one.output_tokens
    if is_billed:
        return []
    return [
        f"{who} has {one.output_tokens} tokens; booked: {row['outcome']}, {row['output_tokens']}, {row['error_code']}"
    ]


def overspent(
    quotas: Sequence[Row], asked: Iterable[Asked], rows: Mapping[str, Row], tenants: Sequence[Tenant]
) -> list[str]:
    """Return the limits that were exceeded."""
    wrong = [
        f"{quota['kind']} of {quota['scope_id']}: {quota['used']} of {quota['cap']}"
        for quota in quotas
        if quota["kind"].endswith(("_day", "_month")) and quota["used"] > quota["cap"]
    ]
    by_tenant: defaultdict[str, list[Asked]] = defaultdict(list)
    for one in asked:
        if one.answer_id in rows:
            by_tenant[one.tenant.name].append(one)
    for tenant in tenants:
        limits, mine = {kind: cap for (_, kind), cap in tenant.limits.items()}, by_tenant[tenant.name]
        if not limits:
            continue
        spans = [(one.sent_s, _over_s(one), 1) for one in mine]
        tokens = [(one.sent_s, _over_s(one), _tokens(rows[one.answer_id])) for one in mine]
        for kind, drawn in (("requests_per_minute", spans), ("tokens_per_minute", tokens)):
            worst = max(_excess(drawn, limits[kind]), default=0.0)
            if worst > 0:
                wrong.append(f"{kind} of {tenant.name}: {worst:.0f} more than {limits[kind]} allow")
        together = most_at_once((one.first_s, one.end_s) for one in mine if one.first_s is not None)
        if together > limits["concurrent_requests"]:
            wrong.append(f"concurrent_requests of {tenant.name}: {together} of {limits['concurrent_requests']}")
    return wrong


def _over_s(one: Asked) -> float:
    """Return the time by which all usage of the request has been drawn."""
    return one.end_s + (0.0 if one.outcome is Outcome.WHOLE else OVERHANG_S)


def _tokens(row: Row) -> int:
    return int(row["prompt_tokens"]) + int(row["output_tokens"])


def _excess(drawn: Sequence[tuple[float, float, int]], cap: int) -> Iterator[float]:
    """Yield, for each time span, the usage beyond the amount that a bucket of `cap` per minute allows.

    Gateways may have drawn from the bucket some time before.
    """
    for begin_s, _, _ in drawn:
        amount = 0
        for _, to_s, each in sorted((one for one in drawn if one[0] >= begin_s), key=lambda one: one[1]):
            amount += each
            yield amount - cap * (1 + (to_s - begin_s + HELD_S) / 60)


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """Return the largest number of spans that overlap at one moment."""
    edges = sorted([edge for begin_s, end_s in spans for edge in ((begin_s, 1), (end_s, -1))])
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def attainment(asked: Iterable[Asked], windows: Sequence[Window]) -> tuple[float, int]:
    """Return the SLO attainment of priority requests outside of faults and recovery, and their number."""
    broken = [(window.begin_s, window.end_s + RECOVERY_S) for window in windows]
    found = [
        one.kept
        for one in asked
        if one.tenant.service == "priority"
        and one.outcome is not Outcome.LEFT
        and not any(begin_s <= one.end_s and one.due_s <= end_s for begin_s, end_s in broken)
    ]
    return (sum(found) / len(found) if found else 1.0), len(found)


def row_of(window: Window, asked: Sequence[Asked]) -> dict[str, Any]:
    """Return the report's row of one fault."""
    during = [one for one in asked if window.begin_s <= one.end_s and one.due_s < window.end_s]
    after = [one for one in asked if window.end_s <= one.due_s and one.end_s < window.next_s]
    last_s = max((one.due_s - window.end_s for one in after if one.suffered), default=0.0)
    return {
        "fault": window.name,
        "seconds": round(window.end_s - window.begin_s, 1),
        "during": _outcomes(during),
        "after": _outcomes(after),
        "whole_after_s": None if window.whole_after_s is None else round(window.whole_after_s, 1),
        "last_failure_after_s": round(last_s, 1),
        "recovered": last_s <= RECOVERY_S and window.whole_after_s is not None,
        "machine_late_s": round(window.late_s, 2),
        "suffered_after": dict(
            Counter(f"{one.outcome.value} {one.status} {one.code}" for one in after if one.suffered)
        ),
        **({"notes": window.notes} if window.notes else {}),
    }


def count_outcomes(asked: Iterable[Asked]) -> dict[str, int]:
    """Return the number of requests by outcome."""
    return dict(Counter(one.outcome.value for one in asked))


def _outcomes(asked: Sequence[Asked]) -> dict[str, int]:
    return {"requests": len(asked), **count_outcomes(asked)}
