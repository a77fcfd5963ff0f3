"""The details of a request in words, and a search that stays as it is while one of its rows is picked."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

import pytest
from streamlit.testing.v1 import AppTest

from moiety_dashboard.frames.requests import fields_frame
from moiety_dashboard.views.traces.one import ending_of

REQUEST: dict[str, Any] = {
    "request_id": "chatcmpl-1", "started_at": "2026-03-09T12:00:05.123456Z", "tenant_id": "ten_a", "key_id": "k1",
    "outcome": "stop", "http_status": 200, "prompt_tokens": 12_345, "cost_nanodollars": 12_345_678, "ttft_ms": 1234.5,
    "duration_ms": 15.683203999, "slo_attained": True, "guarantee_met": None, "credit_nanodollars": 0,
    "expert_read_bytes": 12_345_678, "tags": {"team": "search"}, "has_trace": True, "of_a_later_release": 7,
}  # fmt: skip


def test_the_fields_of_a_request_have_words_units_names_and_the_time_zone() -> None:
    frame = fields_frame(REQUEST, {"ten_a": "acme"}, ZoneInfo("Europe/Berlin"))
    assert list(frame.fillna("–").itertuples(index=False, name=None)) == [
        ("Request", "chatcmpl-1"),
        ("Started", "2026-03-09 13:00:05.123 CET"),
        ("Tenant", "acme (ten_a)"),
        ("Key", "k1"),
        ("Outcome", "stop"),
        ("HTTP status", "200"),
        ("Prompt tokens", "12,345"),
        ("Cost, after credits", "$0.012345678"),
        ("TTFT", "1.23 s"),
        ("Duration", "16 ms"),
        ("SLO", "attained"),
        ("Guarantee of the quote", "–"),
        ("Credit", "$0"),
        ("Tags", "team=search"),
        ("Bytes of experts read", "12.3 MB"),
        ("of a later release", "7"),
    ]


def search() -> None:
    """Script of a page that searches at each run."""
    import streamlit as st

    from moiety_dashboard.client import Answer
    from moiety_dashboard.views.searches import StoredSearch

    class Client:
        def get(self, path: str, **given: object) -> Answer:
            st.session_state["asked"] = st.session_state.get("asked", 0) + 1
            return Answer({"data": [st.session_state["asked"]]}, path)

    found = StoredSearch("log", "/requests", "request_id", 200)
    given = {"outcome": st.session_state.get("outcome"), "since": st.session_state.get("asked")}
    st.text(found.ask(Client(), given).data["data"][0])


def test_results_stay_while_a_row_is_picked_and_the_filters_are_the_same() -> None:
    app = AppTest.from_function(search, default_timeout=120)

    def shown() -> str:
        return str(app.run().text[0].value)

    assert [shown(), shown()] == ["1", "2"]
    app.session_state["log picked"] = "chatcmpl-1"
    assert [shown(), shown()] == ["2", "2"]  # so that the picked row stays where the browser marks it
    app.session_state["outcome"] = "failed"
    assert [shown(), shown()] == ["3", "3"]
    del app.session_state["log picked"]
    assert shown() == "4"


@pytest.mark.parametrize(
    ("outcome", "more", "said"),
    [
        ("length", {"gen_ai.response.finish_reasons": ["length"]}, "at its token limit"),
        ("stop", {"gen_ai.response.finish_reasons": ["tool_calls", "stop"]}, "tool_calls"),
        ("rejected", {"error.type": "quota_exceeded"}, "quota_exceeded"),
        ("disconnected", {}, "no response"),
    ],
)
def test_the_end_of_a_traced_request_says_more_than_its_outcome(outcome: str, more: dict[str, Any], said: str) -> None:
    assert ending_of({"moiety.outcome": outcome, **more}) == said
