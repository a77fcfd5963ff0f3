"""LoRA adapters of tenants: their state and size, and their deletion."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import colours, panels, session
from moiety_dashboard.client import AdminClient, path_of
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import in_bytes
from moiety_dashboard.frames.catalogue import adapters_frame
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile
from moiety_dashboard.views.tenants.names import names_of

NONE, HOW = "No adapter is stored.", "Upload one with: `moiety adapter add`."
STATES = {"ready": colours.GOOD, "uploading": colours.WARN}


def draw(page: Page) -> None:
    panels.head("Adapters", "LoRA adapters, which tenants use as models")
    page.live(draw_list, slower=2)
    if session.may("adapters.write"):
        with page.asking("adapter deletion") as client:
            ask_deletion(client)


def draw_list(client: AdminClient) -> None:
    answer = client.get("/adapters")
    frame = adapters_frame(answer.data["data"], names_of(client))
    figures = [
        Tile("Adapters", f"{len(frame)}", f"{int((frame['state'] == 'ready').sum())} ready"),
        Tile("Size", in_bytes(total_bytes(frame)), "of all uploaded tensors"),
    ]
    if not session.is_of_one_tenant():
        figures.append(Tile("Tenants", f"{frame['tenant'].nunique()}", "with an adapter"))
    panels.tiles(figures, [answer], key="adapter figures")
    with panels.panel("Adapters", "by tenant, model and name", [answer], key="adapters", frame=frame):
        panels.table(frame, columns(), f"{NONE}{session.advice(HOW, 'adapters.write')}", states=STATES, max_rows=16)


def total_bytes(frame: pd.DataFrame) -> float | None:
    """Return the bytes of all adapters; None if the sizes of all are unknown, as of those that engines have."""
    sizes = frame["bytes"].dropna()
    return float(sizes.sum()) if len(sizes) or frame.empty else None


def ask_deletion(client: AdminClient) -> None:
    adapters = client.get("/adapters").data["data"]
    if not adapters:
        return
    names = names_of(client)
    labels = {one["id"]: f"{one['served_as']} ({names.get(one['tenant_id'], one['tenant_id'])})" for one in adapters}
    with st.container(border=True):
        st.markdown("**Delete an adapter**")
        chosen = st.selectbox("Adapter", list(labels), format_func=lambda adapter_id: labels[adapter_id])
        if st.button("Delete adapter", icon=":material/delete:"):
            panels.ask_deletion(
                client,
                path_of("adapters", chosen),
                f"Delete **{as_text(labels[chosen])}**? Requests that name it get 404 within seconds.",
                "The adapter is deleted.",
            )


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "served_as": column.TextColumn("Model name", width="medium", help="As clients send it"),
        "tenant": "Tenant",
        "state": "State",
        "bytes": column.NumberColumn("Size", format="bytes"),
        "source": "Source",
        "created": panels.time_column("Created", "YYYY-MM-DD HH:mm"),
        "id": column.TextColumn("Id", width="medium"),
    }
