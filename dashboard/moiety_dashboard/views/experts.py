"""Experts: their load, its balance, and the tenants that cause it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import charts, colours, panels, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import NO_VALUE, in_bytes, percent, short
from moiety_dashboard.frames import experts as frames
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile

WINDOWS = {"5 min": 5, "15 min": 15, "1 h": 60, "since start": 0}
BYTES_REFRESH_S = 60.0
ALL_TENANTS = "all tenants"
DENSE, HOW_DENSE = "is a dense model without experts.", "Serve an MoE model to see its expert load here."
NO_ENGINE, HOW_ENGINE = (
    "No connected engine reports expert load. External engines do not.",
    "Start one with `moiety engine`, or see the state of each engine on the Engines page.",
)
NO_LOAD = (
    "No token was routed to an expert in this time range. Send a request on the Playground page; counts appear within "
    "a few seconds."
)


def draw(page: Page) -> None:
    page.live(draw_live, slower=2)
    if not session.is_of_one_tenant():  # sums of a day, which change slowly
        page.live(draw_bytes, slower=max(1.0, BYTES_REFRESH_S / page.settings.refresh_s))
    if session.may("experts.plan"):
        with page.asking() as client:
            draw_plan(client)


def draw_live(client: AdminClient) -> None:
    panels.head("Experts", "Expert load, its balance, and its tenants")
    row = st.container(horizontal=True, vertical_alignment="bottom")
    label = row.segmented_control(
        "Window", list(WINDOWS), default="15 min", key="experts window", label_visibility="collapsed"
    )
    window = label or "15 min"
    tenant_id = choose_tenant(client, row)
    answer = client.get("/experts", minutes=WINDOWS[window], tenant_id=tenant_id)
    model = choose_model(answer.data["data"], row)
    if model is None:
        return
    if not model["tokens"]:
        st.info(NO_LOAD, icon=":material/grid_on:")
        return
    draw_model(model, answer, window)


def draw_bytes(client: AdminClient) -> None:
    """Draw the bytes of experts that each tenant's requests read and moved; a share depends on other tenants.

    The time span is whole hours, so that the gateway reads its hourly sums and no single requests. Nothing is drawn if
    no request has read experts.
    """
    until = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    since = until - timedelta(hours=24)
    answer = client.get("/usage", group_by="tenant", since=since.isoformat(), until=until.isoformat())
    frame = frames.bytes_frame(answer.data["data"])
    if frame.empty:
        return
    shown = frame.assign(**{name: [in_bytes(None if pd.isna(one) else one) for one in frame[name]]
                            for name in ("read", "per_token", "moved")})  # fmt: skip
    column = st.column_config
    columns = {
        "tenant": column.TextColumn("Tenant"),
        "read": column.TextColumn("Read", help="Weights of experts that steps read, divided among their tokens"),
        "share": column.ProgressColumn("Share", min_value=0.0, max_value=1.0, format="percent"),
        "per_token": column.TextColumn("Read per token", help="Per token of prompt and answer, without cached ones"),
        "moved": column.TextColumn("Moved", help="Experts loaded from host or disk, or moved between ranks"),
    }
    with panels.panel("Expert bytes by tenant", "last 24 h", [answer], key="expert bytes", frame=frame):
        panels.table(shown, columns, "", max_rows=12)


def choose_tenant(client: AdminClient, row: Any) -> str | None:
    """Return one tenant's id, or None for all; a user of one tenant has no choice."""
    if session.is_of_one_tenant():
        return None
    tenants = {one["name"]: one["id"] for one in client.list("/tenants").data}
    names = [ALL_TENANTS, *sorted(tenants)]
    chosen = row.selectbox("Tenant", names, key="experts tenant", width=220, label_visibility="collapsed")
    return tenants.get(chosen)


def choose_model(models: list[dict[str, Any]], row: Any) -> Mapping[str, Any] | None:
    """Return the selected model; if none has experts, show what to do."""
    mixtures = {one["model"]: one for one in frames.models_with_experts(models)}
    if mixtures:
        if len(mixtures) == 1:
            return next(iter(mixtures.values()))
        return mixtures[row.selectbox("Model", list(mixtures), key="experts model", label_visibility="collapsed")]
    for one in models:
        how = session.advice(HOW_DENSE, session.DEPLOYS)
        st.info(f"{as_text(one['model'])} {DENSE}{how}", icon=":material/grid_off:")
    if not models:
        st.info(f"{NO_ENGINE}{session.advice(HOW_ENGINE, session.DEPLOYS)}", icon=":material/grid_off:")
    return None


def draw_model(model: Mapping[str, Any], answer: Answer, window: str) -> None:
    cells = frames.cells(model)
    panels.tiles(tiles(model, cells), [answer])
    if frames.is_thin(model):
        mean = model["tokens"] * model["experts_per_token"] / model["num_experts"]
        st.caption(
            f":material/info: Only {mean:.0f} tokens per expert and layer so far, too few to judge the balance. Choose "
            "a longer window, or wait."
        )
    times = f"tokens ÷ mean of the layer, {window}"
    with panels.panel(f"Load of {model['model']} by layer and expert", times, [answer], key="experts", frame=cells):
        st.altair_chart(charts.load_map(cells, len(model["layers"])), width="stretch", key="expert map")
    left, right = st.columns(2)
    with left:
        draw_over_time(model, answer)
    with right:
        draw_tenants(model, answer, window)
    draw_layers(model, answer, window)


def draw_plan(client: AdminClient) -> None:
    """Draw the effect of replicas over ranks on the last hour's load.

    It is outside the refreshing parts, since the user enters the numbers.
    """
    loaded = [one["model"] for one in client.get("/experts").data["data"] if one["tokens"]]
    if not loaded:
        return
    st.subheader("Expert placement (EPLB) preview", anchor=False)
    st.caption("Compares the default placement with a plan that replicates busy experts. Nothing is changed.")
    row = st.container(horizontal=True, vertical_alignment="bottom")
    model = row.selectbox("Model", loaded, key="plan model", width=220)
    nodes = row.number_input("Nodes", 1, 64, 1, key="plan nodes", width=130)
    ranks = row.number_input("Ranks per node", 1, 64, 4, key="plan ranks", width=130)
    more = row.number_input("Redundant experts", 0, 4096, 4, key="plan redundant", width=160)
    body = {"model": model, "nodes": nodes, "ranks_per_node": ranks, "redundant_experts": more}
    answer = client.ask("/experts/plan", body)
    plan, frame = answer.data, frames.plan_frame(answer.data)
    panels.tiles(plan_tiles(plan, frame), [answer], key="plan figures")
    column = st.column_config
    share: dict[str, Any] = {"min_value": 0.0, "max_value": 1.0, "format": "percent"}
    columns = {
        "layer": column.NumberColumn("Layer", width=70),
        "before": column.ProgressColumn("Before", **share),
        "after": column.ProgressColumn("After", **share),
        "replicas": column.TextColumn("Replicated experts", width=420, help="Expert × number of replicas"),
    }
    with panels.panel("Plan by layer", "for the load of the last hour", [answer], key="plan", frame=frame):
        panels.table(frame, columns, "", max_rows=12)


def plan_tiles(plan: Mapping[str, Any], frame: pd.DataFrame) -> list[Tile]:
    before, after = (percent(plan[f"balancedness_{when}"]) for when in ("before", "after"))
    where = f"in each of {len(plan['layers'])} layers, {plan['ranks']} ranks"
    return [
        Tile(
            "Rank balancedness", after, f"{before} with the default placement", "Mean load of the ranks ÷ the largest."
        ),
        Tile("Expert slots per rank", f"{plan['slots_per_rank']}", where),
        Tile("Replicated experts", f"{frame['replicated'].sum():,}", "over all layers"),
        Tile("Weights to move", in_bytes(plan["moved_bytes"]), f"{plan['moved_experts']:,} experts on a new rank"),
    ]


def tiles(model: Mapping[str, Any], cells: pd.DataFrame) -> list[Tile]:
    hot, unused = frames.hottest(cells), int((cells["tokens"] == 0).sum())
    active = model["active_experts_by_layer"]
    found = [
        Tile("Balancedness", percent(model["balancedness"]), "mean load ÷ largest",
             "Over all layers and engines. At 100 % all experts of a layer have equal load; a step waits for the "
             "busiest."),
        Tile("Tokens", short(model["tokens"]), f"× {model['experts_per_token']} experts per layer"),
        Tile("Busiest expert", NO_VALUE if hot is None else f"{hot['times_mean']:.1f}× mean",
             "" if hot is None else f"expert {hot['expert']:.0f} of layer {hot['layer']:.0f}"),
        Tile("Unused experts", f"{unused:,}", f"of {len(cells):,} in all layers"),
    ]  # fmt: skip
    if active:
        mean = sum(active) / len(active)
        found.append(Tile("Active experts", f"{mean:.1f}", f"of {model['num_experts']} per layer, last 1 h",
                          "Mean number of experts of a layer whose weights a step reads."))  # fmt: skip
    if model["engine_ids"]:
        silent = f"{model['num_silent']} did not respond" if model["num_silent"] else "all responded"
        found.append(Tile("Replicas", f"{len(model['engine_ids'])}", f"sum of engines; {silent}"))
    return found


def draw_over_time(model: Mapping[str, Any], answer: Answer) -> None:
    frame = frames.evenness_frame(model)
    inks = {frames.ALL: colours.TENANTS[0], frames.MOST: colours.GOOD, frames.LEAST: colours.BAD}
    with panels.panel("Balancedness", "by minute, last 1 h at most", [answer], key="evenness", frame=frame):
        figure = charts.Figure("balancedness", "mean load ÷ largest", ".1%")
        panels.draw(
            lambda: charts.lines(frame, figure, "series", inks, span_of(frame)), frame, NO_LOAD, "evenness chart"
        )


def span_of(frame: pd.DataFrame) -> charts.Span:
    """Return the span from the first minute to now, at least a quarter of an hour."""
    now = datetime.now(UTC)
    first = min(frame["slot"].min().to_pydatetime(), now - timedelta(minutes=15))
    return charts.Span(first, now, timedelta(minutes=1))


def draw_tenants(model: Mapping[str, Any], answer: Answer, window: str) -> None:
    frame = frames.tenants_frame(model)
    with panels.panel("Tokens by tenant", f"routed to experts, {window}", [answer], key="load", frame=frame):
        panels.draw(lambda: charts.ranked(frame, "tenant", "tokens", "share"), frame, NO_LOAD, "load chart")


def draw_layers(model: Mapping[str, Any], answer: Answer, window: str) -> None:
    column = st.column_config
    columns = {
        "layer": column.NumberColumn("Layer", width=70),
        "balancedness": column.ProgressColumn("Balancedness", min_value=0.0, max_value=1.0, format="percent"),
        "busiest": column.NumberColumn("Busiest expert", help="Index of the expert, from 0"),
        "times_mean": column.NumberColumn("Load of busiest", format="%.2f× mean"),
        "unused": column.NumberColumn("Unused", help="Experts without tokens"),
        "active": column.NumberColumn(
            "Active per step", format="%.1f", help="Mean active experts in a step, last hour"
        ),
    }
    frame = frames.layers_frame(model)
    with panels.panel("Layers", f"MoE layers, {window}", [answer], key="layers", frame=frame):
        panels.table(frame, columns, NO_LOAD, max_rows=12)
