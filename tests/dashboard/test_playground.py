"""Conversations of the playground: what each model is sent, and how answers are streamed side by side."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest
from tests.server_thread import serving_in_thread

from moiety_dashboard.views.playground.conversation import PlaygroundConversation, PlaygroundSettings, Turn
from moiety_dashboard.views.playground.stream import StreamedAnswer, refusal, streaming

BOTH = PlaygroundSettings(("a", "b"), "auto", 32, 0.5, "Be brief.")
ONE = PlaygroundSettings(("a",), "flex", 8, None, "")
DEADLINE_S = 60


def answered(model: str, text: str) -> StreamedAnswer:
    return StreamedAnswer(model, text=text)


def test_each_model_gets_its_own_earlier_answers() -> None:
    conversation = PlaygroundConversation([Turn("Hi", [answered("a", "from a"), answered("b", "from b")])])
    first, second = conversation.bodies(BOTH, "More")
    assert [one["content"] for one in first["messages"]] == ["Be brief.", "Hi", "from a", "More"]
    assert [one["content"] for one in second["messages"]] == ["Be brief.", "Hi", "from b", "More"]
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "user"]
    assert (first["temperature"], first["max_tokens"], first["service_tier"]) == (0.5, 32, "auto")
    assert (first["model"], second["model"], first["stream"]) == ("a", "b", True)


def test_turns_without_an_answer_and_the_models_own_temperature_are_left_out() -> None:
    failed = answered("a", "")
    conversation = PlaygroundConversation([Turn("lost", [failed]), Turn("kept", [answered("a", "yes")])])
    (body,) = conversation.bodies(ONE, "Next")
    assert [one["content"] for one in body["messages"]] == ["kept", "yes", "Next"]
    assert "temperature" not in body


@dataclass
class ScriptedGateway:
    """Streams two parts for each model; the second part of `slow` waits until `b` has ended."""

    url: str = ""
    asked: list[tuple[Mapping[str, str], Any]] = field(default_factory=list)
    fast_ended: threading.Event = field(default_factory=threading.Event)
    refused: set[str] = field(default_factory=set)


@contextmanager
def scripted() -> Iterator[ScriptedGateway]:
    gateway = ScriptedGateway()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            gateway.asked.append((dict(self.headers), body))
            model = body["model"]
            if model in gateway.refused:
                told = json.dumps({"error": {"code": "quota_exceeded", "message": "Used up."}}).encode()
                self._head(429, {"retry-after": "7", "content-length": str(len(told))})
                self.wfile.write(told)
                return
            self._head(200, {"content-type": "text/event-stream", "x-ratelimit-limit-requests": "9"})
            self._event(
                {"id": "chatcmpl-1", "choices": [{"delta": {"reasoning_content": "hm "}, "finish_reason": None}]}
            )
            if model == "slow":
                gateway.fast_ended.wait(DEADLINE_S)
            self._event({"choices": [{"delta": {"content": f"{model} says"}, "finish_reason": "stop"}]})
            self._event({"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 2}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"x-request-id": "req_1", "connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def _event(self, event: Any) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def log_message(self, *args: Any) -> None:
            pass

    with serving_in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        gateway.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield gateway
        finally:
            gateway.fast_ended.set()


@pytest.mark.timeout(DEADLINE_S)
def test_two_answers_arrive_at_the_same_time() -> None:
    with scripted() as gateway:
        bodies = [{"model": "slow"}, {"model": "b"}]
        with streaming(gateway.url, "mty_key", bodies) as (answers, steps):
            slow, fast = answers
            for _ in steps:
                if fast.ended_s is not None:
                    gateway.fast_ended.set()
        assert (slow.text, fast.text) == ("slow says", "b says")
        assert (slow.reasoning, slow.finish_reason, slow.usage["completion_tokens"]) == ("hm ", "stop", 3)
        assert (slow.request_id, slow.completion_id) == ("req_1", "chatcmpl-1"), "the request log has the second"
        assert slow.limits == {"x-ratelimit-limit-requests": "9"}
        assert slow.ended_s is not None
        assert fast.ended_s is not None
        assert slow.ended_s >= fast.ended_s
        assert slow.ttft_ms is not None
        assert slow.trace_id != fast.trace_id
        headers = [given for given, _ in gateway.asked]
        assert {one["Authorization"] for one in headers} == {"Bearer mty_key"}
        traces = {one["traceparent"].split("-")[1] for one in headers}
        assert traces == {slow.trace_id, fast.trace_id}


@pytest.mark.timeout(DEADLINE_S)
def test_a_refusal_of_one_model_does_not_end_the_other_answer() -> None:
    with scripted() as gateway:
        gateway.refused.add("a")
        with streaming(gateway.url, "k", [{"model": "a"}, {"model": "b"}]) as (answers, steps):
            for _ in steps:
                pass
        refused, served = answers
        assert refused.error == "429 quota_exceeded: Used up. Retry after 7 s."
        assert (refused.request_id, refused.completion_id) == ("req_1", "")
        assert (served.error, served.text) == ("", "b says")


@pytest.mark.parametrize(
    ("message", "after", "shown"),
    [
        ("have the limit raised", "58749", "429 quota_exceeded: have the limit raised. Retry after 16 h 19 min."),
        ("Used up.", "99", "429 quota_exceeded: Used up. Retry after 99 s."),
        ("Used up.", "Wed, 21 Oct 2026", "429 quota_exceeded: Used up. Retry after Wed, 21 Oct 2026."),
        ("Used up.", None, "429 quota_exceeded: Used up."),
    ],
)
def test_a_refusal_says_when_to_retry_in_words(message: str, after: str | None, shown: str) -> None:
    headers = {} if after is None else {"retry-after": after}
    body = {"error": {"code": "quota_exceeded", "message": message}}
    assert refusal(httpx.Response(429, json=body, headers=headers)) == shown


@pytest.mark.timeout(DEADLINE_S)
def test_a_gateway_that_is_gone_is_an_error_of_the_answer() -> None:
    with scripted() as gateway:
        url = gateway.url
    with streaming(url, "k", [{"model": "a"}]) as (answers, steps):
        for _ in steps:
            pass
    assert "The connection to the gateway failed (ConnectError)" in answers[0].error


def playground(url: str) -> None:
    """Script that draws the playground for a user who may see nothing else."""
    import streamlit as st

    from moiety_dashboard import session
    from moiety_dashboard.page import Page
    from moiety_dashboard.settings import DashboardSettings
    from moiety_dashboard.views.playground import page

    st.session_state[session.CALLER] = {"tenant_id": "ten_a", "may": [], "role": "developer"}
    st.session_state.setdefault(page.FIELDS, {"model": "a", "other": "b"})
    page.draw(Page(DashboardSettings(url), "mty_admin"))


@pytest.mark.timeout(DEADLINE_S)
def test_prompts_follow_each_other_without_leaving_the_page_and_one_without_an_answer_stays() -> None:
    with scripted() as gateway:
        app = AppTest.from_function(playground, default_timeout=DEADLINE_S, args=(gateway.url,)).run()
        app.text_input[0].set_value("mty_key")
        sent: list[str] = []
        for text, refused, left in (("first", (), ""), ("lost", ("a", "b"), "lost"), ("third", (), "")):
            gateway.refused = set(refused)
            field = next(one for one in app.text_area if one.label == "Prompt")
            assert field.value == ("What is 17 + 25?" if not sent else sent[-1])
            field.set_value(text)
            next(one for one in app.button if one.label == "Send").click()
            app.run()
            assert not app.exception and not app.warning, text
            sent.append(left)
        prompts = [[one["content"] for one in body["messages"] if one["role"] == "user"] for _, body in gateway.asked]
    assert prompts == [["first"], ["first"], ["first", "lost"], ["first", "lost"], *[["first", "third"]] * 2]


def test_a_conversation_forgets_its_oldest_turns_but_counts_them() -> None:
    conversation = PlaygroundConversation()
    for number in range(5):
        conversation.add_turn(Turn(str(number), [answered("a", "yes")]), max_turns=3)
    conversation.add_turn(Turn("lost", [answered("a", "")]), max_turns=3)
    assert [turn.prompt for turn in conversation.turns] == ["3", "4", "lost"] and conversation.num_answered == 5
