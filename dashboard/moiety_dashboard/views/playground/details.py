"""Beside an answer of the playground: its latency, tokens, cost, rate limits and trace."""

from __future__ import annotations

import streamlit as st

from moiety_dashboard import panels, session, waterfall
from moiety_dashboard.client import AdminClient, Answer, ApiRefused, path_of
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.formatting import dollars, milliseconds, short
from moiety_dashboard.frames import traces as frames
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.playground.conversation import TIERS
from moiety_dashboard.views.playground.stream import StreamedAnswer
from moiety_dashboard.views.traces.kept import TRACE, kept

TRACES = "traces"  # path of the traces page, which not every user may see
STORED_WITHIN_S = 6.0  # time until a kept trace and a usage row are stored
MAX_BARS = 40  # the page of the trace has all


def draw_figures(answer: StreamedAnswer) -> None:
    """Show the latency that this client measured, and the usage that the answer reports.

    A refused request has neither.
    """
    if answer.error and answer.first_s is None:
        return
    usage = answer.usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    panels.tiles(
        [
            Tile("TTFT", milliseconds(answer.ttft_ms), "measured by the dashboard"),
            Tile("Duration", milliseconds(answer.duration_ms), answer.finish_reason or "not finished"),
            Tile("Decode speed", f"{short(answer.decode_speed)} tok/s", "after the first token"),
            Tile("Tokens", f"{short(usage.get('completion_tokens'))} out",
                 f"{short(usage.get('prompt_tokens'))} in, {short(cached)} cached"),
            Tile("Class", TIERS.get(answer.tier, answer.tier) or "–", "that served the request"),
        ],
        key=f"figures {answer.trace_id}",
    )  # fmt: skip


def draw_details(client: AdminClient, page: Page, answer: StreamedAnswer, waited_s: float, *, is_narrow: bool) -> None:
    """Draw the cost as the request log has it, and the trace, once both are stored."""
    if answer.completion_id and session.may("usage.read"):
        draw_cost(client, answer, waited_s)
    if TRACES in page.others:
        draw_trace(client, page, answer, waited_s, is_narrow=is_narrow)
    if answer.limits:
        with st.expander("Rate limit headers"):
            lines = [f"{name}: {show_unseen(value)}" for name, value in sorted(answer.limits.items())]
            st.code("\n".join(lines), language=None)


def draw_cost(client: AdminClient, answer: StreamedAnswer, waited_s: float) -> None:
    """Draw the request's cost as its usage row has it, once that is stored."""
    if answer.cost_nanodollars is None:
        row = find(client, path_of("requests", answer.completion_id))
        if row is None:
            is_early = waited_s < STORED_WITHIN_S
            st.caption("Waiting for the cost …" if is_early else "The request has no usage row.")
            return
        answer.cost_nanodollars = row.data["cost_nanodollars"]
    draw_known_cost(answer)


def draw_known_cost(answer: StreamedAnswer) -> None:
    cost = dollars(answer.cost_nanodollars)
    st.caption(f"Cost **{as_text(cost)}** · request {as_text(answer.completion_id)}")


def draw_trace(client: AdminClient, page: Page, answer: StreamedAnswer, waited_s: float, *, is_narrow: bool) -> None:
    """Draw the spans of the request with a link to its trace, or the reason why it is missing."""
    stored = find(client, path_of("traces", answer.trace_id))
    if stored is None:
        missing = "Waiting for the trace …" if waited_s < STORED_WITHIN_S else f"The trace was not sampled. {kept()}"
        st.caption(missing)
        return
    spans = stored.data["spans"]
    bars, events = frames.bars_frame(spans).head(MAX_BARS), frames.events_frame(spans)
    there = events[events["row"].isin(bars["row"])]
    if not bars.empty:
        key = f"waterfall {answer.trace_id}"
        st.altair_chart(waterfall.waterfall(bars, there, is_narrow=is_narrow), width="stretch", key=key)
    icon = ":material/account_tree:"
    st.page_link(page.others[TRACES], label="Open trace", icon=icon, query_params={TRACE: answer.trace_id})


def find(client: AdminClient, path: str) -> Answer | None:
    """Return an object that may not be stored yet; None without it."""
    try:
        return client.get(path)
    except ApiRefused as exc:
        if exc.code not in ("trace_not_found", "not_found", "request_not_found"):
            raise
        return None
