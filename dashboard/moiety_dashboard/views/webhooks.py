"""Webhooks: the receivers of alerts. Create in the format of Slack, PagerDuty or JSON, test and delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, ApiError, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import milliseconds
from moiety_dashboard.frames.catalogue import shown_address, webhooks_frame
from moiety_dashboard.page import Page

SECRET = "webhook secret"
NEW = "new webhook"  # form
REPORT = "webhook test"
FORMATS = {"json": "JSON: the event itself", "slack": "Slack: a message", "pagerduty": "PagerDuty: an incident"}
EXAMPLES = {
    "json": "https://ops.example.com/moiety",
    "slack": "https://hooks.slack.com/services/…",
    "pagerduty": "https://events.pagerduty.com/v2/enqueue",
}
GROUPS = {"quota": "quotas and budgets", "engine": "engine down and up", "slo": "SLO burn rate", "disk": "disk space"}
REASONS = {
    "name_not_resolved": "the name of the host is not resolved",
    "address_not_allowed": "the address is not allowed; the setting webhook_networks names internal networks",
    "timeout": "no response in time",
    "connection_failed": "the connection failed",
}
NONE, HOW = "No webhook receives alerts.", "Create one below."


def draw(page: Page) -> None:
    panels.head("Webhooks", "Receivers of alerts, and the state of their deliveries")
    page.live(draw_list, slower=2)
    if not session.may("webhooks.write"):
        return
    show_secret()
    with page.asking("webhook changes") as client:
        left, right = st.columns(2)
        with left:
            ask_new(client)
        with right:
            ask_test(client, client.get("/webhooks").data["data"])


def draw_list(client: AdminClient) -> None:
    answer = client.get("/webhooks")
    frame = webhooks_frame(answer.data["data"])
    with panels.panel("Webhooks", "oldest first", [answer], key="webhooks", frame=frame):
        panels.table(frame, columns(), f"{NONE}{session.advice(HOW, 'webhooks.write')}")


def show_secret() -> None:
    """Show the secret of a new webhook until it is dismissed."""
    panels.show_once(SECRET, ":material/key: **Copy this secret now.** It signs the events, and is shown only once.")


def ask_new(client: AdminClient) -> None:
    with st.container(border=True):
        st.markdown("**New webhook**")
        form = st.selectbox("Format", list(FORMATS), format_func=lambda name: FORMATS[name], key="webhook format")
        with st.form(panels.form_key(NEW), border=False):
            url = st.text_input("Address", placeholder=EXAMPLES[form])
            key = None
            if form == "pagerduty":
                key = st.text_input(
                    "Routing key", type="password", autocomplete="off",
                    help="Integration key of an Events API v2 integration of a PagerDuty service.",
                )  # fmt: skip
            groups = st.multiselect("Events", list(GROUPS), list(GROUPS), format_func=lambda name: GROUPS[name])
            if st.form_submit_button("Create webhook", type="primary"):
                body = {"url": url.strip(), "format": form, "events": groups}
                if key is not None:
                    body["routing_key"] = key.strip()
                made = panels.attempt(lambda: client.change("POST", "/webhooks", body), "The webhook is created.")
                if made is not None:
                    st.session_state[SECRET] = made["secret"]
                    panels.clear_form(NEW)
                    st.rerun()


def ask_test(client: AdminClient, webhooks: Sequence[Mapping[str, Any]]) -> None:
    with st.container(border=True):
        st.markdown("**Test or delete**")
        if not webhooks:
            st.caption("There is no webhook.")
            return
        labels = {one["id"]: f"{shown_address(one)} ({one['format']})" for one in webhooks}
        chosen = st.selectbox("Webhook", list(labels), format_func=lambda webhook_id: labels[webhook_id])
        left, right = st.columns(2)
        if left.button("Send a test", icon=":material/send:", width="stretch"):
            st.session_state[REPORT] = chosen, send_test(client, chosen)
        if right.button("Delete webhook", icon=":material/delete:", width="stretch"):
            panels.ask_deletion(
                client,
                path_of("webhooks", chosen),
                f"Delete **{as_text(labels[chosen])}**? It receives no more events, also those that wait.",
                "The webhook is deleted.",
            )
        tested, report = st.session_state.get(REPORT, (None, None))
        if tested == chosen and report is not None:
            draw_report(report)


def send_test(client: AdminClient, webhook_id: str) -> Mapping[str, Any] | None:
    """Send a test event; return the gateway's report, None if the request failed, which is shown."""
    try:
        found: Mapping[str, Any] = client.change("POST", path_of("webhooks", webhook_id, "test"))
    except ApiError as exc:
        st.error(as_text(exc), icon=":material/error:")
        return None
    return found


def draw_report(report: Mapping[str, Any]) -> None:
    """Show the receiver's status and the beginning of its response, which is text of another server."""
    took, status = milliseconds(report["duration_ms"]), report["status"]
    if report["delivered"]:
        st.success(f"Delivered: status {as_text(status)} after {as_text(took)}.", icon=":material/check_circle:")
    else:
        st.error(
            f"Not delivered after {as_text(took)}: {as_text(reason_of(report))}. Check the address and the receiver.",
            icon=":material/error:",
        )
    if report["excerpt"]:
        st.caption("Beginning of the response")
        st.code(report["excerpt"], language=None, wrap_lines=True)


def reason_of(report: Mapping[str, Any]) -> str:
    """Return in words why a test was not delivered."""
    if report["status"] is not None:
        return f"the receiver answered with status {report['status']}"
    return REASONS.get(report["error"]) or str(report["error"]).replace("_", " ")


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "address": column.TextColumn("Address", width="large"),
        "format": "Format",
        "events": column.TextColumn("Events", width="medium"),
        "pending": panels.count_column("Waiting"),
        "dead": panels.count_column("Given up", tooltip="In the last 30 days"),
        "error": "Last error",
        "failed": panels.time_column("Last failed", "YYYY-MM-DD HH:mm:ss"),
        "delivered": panels.time_column("Last delivered", "YYYY-MM-DD HH:mm:ss"),
        "id": column.TextColumn("Id", width="medium"),
    }
