"""Refunds on the real engine: exactly the requests whose guarantee is missed are credited, by their class's terms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
CREDIT_PERCENT = 25
DEADLINE_S = 120
NUM_SHORT = 4


@pytest.fixture
def credited(server: Any) -> Iterator[Any]:
    """The server, with a price of its model and credits in its class."""
    server.admin.put("/admin/v1/prices", json={"model": server.model, "input": "1", "output": "2"}).raise_for_status()
    terms = "/admin/v1/classes/standard"
    server.admin.patch(terms, json={"credit_percent": CREDIT_PERCENT}).raise_for_status()
    yield server
    server.admin.patch(terms, json={"credit_percent": 0}).raise_for_status()
    server.admin.delete("/admin/v1/prices", params={"model": server.model}).raise_for_status()


def body_of(server: Any, text: str, max_tokens: int) -> dict[str, Any]:
    """Return a request of a length that is known."""
    messages = [{"role": "user", "content": text}]
    return {"model": server.model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True}


def quote_of(account: Any, body: dict[str, Any]) -> dict[str, Any]:
    answer = account.post("/v1/quote", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = next(one for one in answer.json()["data"] if one["service_class"] == "standard")
    return found


def guaranteed_quote(account: Any, until: Any, body: dict[str, Any]) -> str:
    """Return a quote with a guarantee, which there is once the engine has learned its step times."""

    def ask() -> str | None:
        found = quote_of(account, body)
        if found["guarantee"] is None:
            account.post(CHAT, body_of(account.server, "learn", 64)).raise_for_status()
            return None
        return str(found["quote"])

    return str(until(ask, "a guarantee"))


def follow(account: Any, body: dict[str, Any], quote: str, started: Event) -> None:
    """Read a stream to its end or its error."""
    headers = account.headers | {"x-moiety-quote": quote}
    url = account.server.url + CHAT
    with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers, timeout=DEADLINE_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {") and "content" in line:
                started.set()


def test_credits_are_those_of_the_missed_guarantees(credited: Any, account: Any, until: Any) -> None:
    """One answer breaks off, as its engine is killed; of the others the time decides, which the test leaves open."""
    num_restarts = credited.output.count("the engine is back")
    short = body_of(credited, "hello", 8)
    for _ in range(NUM_SHORT):
        quote = guaranteed_quote(account, until, short)
        headers = account.headers | {"x-moiety-quote": quote}
        httpx.post(credited.url + CHAT, json=short, headers=headers, timeout=DEADLINE_S).raise_for_status()
    long, started = body_of(credited, "a tale", 1900), Event()
    quote = guaranteed_quote(account, until, long)
    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(follow, account, long, quote, started)
        assert started.wait(DEADLINE_S), "the stream did not start"
        credited.core_process().kill()
        followed.result(DEADLINE_S)
    until(lambda: credited.output.count("the engine is back") > num_restarts, "serve says that the engine is back")
    until(credited.is_serving, "readiness")
    until(lambda: sum(row["guarantee_met"] is not None for row in account.rows()) == NUM_SHORT + 1, "all rows")
    rows = account.rows()
    (broken,) = [row for row in rows if row["outcome"] == "failed"]
    assert (broken["guarantee_met"], broken["credit_reason"]) == (False, "failed"), json.dumps(broken)
    for row in rows:
        full = row["cost_nanodollars"] + row["credit_nanodollars"]
        is_missed = row["guarantee_met"] is False
        assert row["credit_nanodollars"] == (full * CREDIT_PERCENT // 100 if is_missed else 0), json.dumps(row)
        assert (row["credit_reason"] is not None) == is_missed
        assert row["credit_nanodollars"] > 0 or not is_missed
    totals = credited.get("/admin/v1/usage", group_by="key")["data"]
    (mine,) = [one["totals"] for one in totals if one["group"]["key_id"] == account.key_id]
    assert mine["credit_nanodollars"] == sum(row["credit_nanodollars"] for row in rows)
    num_missed = sum(row["guarantee_met"] is False for row in rows)
    assert mine["num_guarantees"] - mine["num_guarantees_met"] == num_missed >= 1
    assert credited.get("/admin/v1/usage/reconciliation")["agrees"]
