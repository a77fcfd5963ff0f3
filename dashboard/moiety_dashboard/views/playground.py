"""The playground: a request under a tenant's key, and its tokens as they arrive."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import streamlit as st

from moiety_dashboard import panels
from moiety_dashboard.client import AdminClient, ApiRefused, path_of, read_error, read_message
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.formatting import milliseconds, short
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.key_forms import PLAYGROUND_KEY
from moiety_dashboard.views.traces.kept import KEPT, TRACE

TIERS = {"auto": "tenant default", "priority": "priority", "default": "standard", "flex": "flex"}
TIMEOUT_S = 120.0
LIMIT_HEADERS = ("x-ratelimit-", "ratelimit")
TRACES = "traces"  # path of the traces page, which not every user may see
STORED_WITHIN_S = 6.0  # time until a kept trace is stored


class Refused(Exception):
    """The gateway rejected or failed the request; the message gives the reason."""


@dataclass
class Run:
    """One request in progress. Owned by the page that sends it."""

    started_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    ended_s: float | None = None
    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    request_id: str = ""
    tier: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)


def draw(page: Page) -> None:
    panels.head("Playground", "Send a request with a tenant's key and stream its answer")
    with st.form("request", border=True):
        first, second, third, fourth = st.columns([3, 2, 2, 1])
        kept = st.session_state.get(PLAYGROUND_KEY, "")
        key = first.text_input(
            "API key", kept, type="password", autocomplete="off", placeholder="mty_…",
            help="An inference key of a tenant. It is sent to the gateway with each request, and kept only in this "
                 "browser session.",
        )  # fmt: skip
        model = second.text_input("Model", st.session_state.get("playground model", "moiety-demo"))
        tier = third.selectbox("Class", list(TIERS), format_func=lambda tier: TIERS[tier])
        tokens = fourth.number_input("Max tokens", 1, value=64)
        prompt = st.text_area("Prompt", "What is 17 + 25?", height=90)
        sent = st.form_submit_button("Send", type="primary", icon=":material/send:")
    if not sent:
        st.caption("No request sent yet. Create a key on the Tenants page if you have none.")
        return
    st.session_state[PLAYGROUND_KEY], st.session_state["playground model"] = key.strip(), model
    body = {
        "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": int(tokens),
        "service_tier": tier, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    run = Run()
    send(page.settings.gateway_url, key.strip(), body, run)
    if TRACES in page.others and run.request_id:
        since_s = time.monotonic()
        page.live(lambda client: draw_trace(client, page, run, time.monotonic() - since_s))


def send(url: str, key: str, body: Mapping[str, Any], run: Run) -> None:
    try:
        with st.container(border=True):
            place, text = st.empty(), ""
            for piece in arriving(url, key, body, run):
                text += piece
                place.text(show_unseen(text))  # a model's answer is not rendered as Markdown
    except Refused as exc:
        st.error(as_text(exc), icon=":material/block:")
        return
    except httpx.HTTPError as exc:
        st.error(f"The connection to {as_text(url)} failed ({type(exc).__name__}). Check that the gateway is running.")
        return
    draw_figures(run)


def arriving(url: str, key: str, body: Mapping[str, Any], run: Run) -> Iterator[str]:
    """Yield pieces of text as they arrive. Raises Refused, or httpx.HTTPError."""
    traceparent = f"00-{run.trace_id}-{secrets.token_hex(8)}-01"  # makes its trace easy to find, whatever its outcome
    headers = {"Authorization": f"Bearer {key}", "traceparent": traceparent}
    with (
        httpx.Client(timeout=TIMEOUT_S) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response,
    ):
        run.request_id = response.headers.get("x-request-id", "")
        run.limits = {name: value for name, value in response.headers.items() if name.startswith(LIMIT_HEADERS)}
        if response.is_error:
            response.read()
            raise Refused(refusal(response))
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            yield from take(json.loads(data), run)
    run.ended_s = time.monotonic()


def take(event: Mapping[str, Any], run: Run) -> Iterator[str]:
    """Yield the text of one event. Raises Refused for an answer that failed midway."""
    if "error" in event:
        raise Refused(f"The answer failed midway: {event['error']['message']}")
    run.tier = event.get("service_tier") or run.tier
    run.usage = event.get("usage") or run.usage
    for choice in event.get("choices", []):
        text = choice["delta"].get("content")
        if text:
            run.first_s = run.first_s or time.monotonic()
            yield text


def refusal(response: httpx.Response) -> str:
    """Return status, code, message, and the time to retry."""
    code = read_error(response, "code") or "error"
    after = response.headers.get("retry-after")
    return f"{response.status_code} {code}: {read_message(response)}" + (f" Retry after {after} s." if after else "")


def draw_figures(run: Run) -> None:
    """Show the request's usage and latency, as this client measured them."""
    ended_s = run.ended_s or time.monotonic()
    output = run.usage.get("completion_tokens")
    decode_s = ended_s - run.first_s if run.first_s is not None else 0.0
    speed = (output - 1) / decode_s if output and output > 1 and decode_s > 0 else None
    first_ms = None if run.first_s is None else (run.first_s - run.started_s) * 1000
    panels.tiles(
        [
            Tile("TTFT", milliseconds(first_ms), "measured by the dashboard"),
            Tile("Duration", milliseconds((ended_s - run.started_s) * 1000), "measured by the dashboard"),
            Tile("Decode speed", f"{short(speed)} tok/s", "after the first token"),
            Tile("Tokens", f"{short(output)} out", f"{short(run.usage.get('prompt_tokens'))} in"),
            Tile("Class", run.tier or "–", "that served the request"),
        ]
    )
    st.caption(f"Request {as_text(run.request_id)}" if run.request_id else "")
    if run.limits:
        st.caption("Rate limit headers")
        st.code("\n".join(f"{name}: {show_unseen(value)}" for name, value in sorted(run.limits.items())), language=None)


def draw_trace(client: AdminClient, page: Page, run: Run, waited_s: float) -> None:
    """Draw a link to the request's trace once it is stored, or the reason why it is missing."""
    try:
        client.get(path_of("traces", run.trace_id))
    except ApiRefused as exc:
        if exc.code != "trace_not_found":
            st.caption(f"The trace is not available: {as_text(exc)}")
        elif waited_s < STORED_WITHIN_S:
            st.caption("Waiting for the trace …")
        else:
            st.caption(f"The trace was not sampled. {KEPT}")
        return
    icon = ":material/account_tree:"
    st.page_link(page.others[TRACES], label="Open trace", icon=icon, query_params={TRACE: run.trace_id})
