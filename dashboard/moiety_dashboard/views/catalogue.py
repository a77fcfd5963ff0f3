"""The catalogue of models: features, prices, load, and the tenants that may use each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moiety_dashboard import colours, panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.escaping import as_text
from moiety_dashboard.formatting import short
from moiety_dashboard.frames import catalogue as frames
from moiety_dashboard.page import Page
from moiety_dashboard.panels import Tile

TOTALS = "output tokens by model"  # of the last two different reports, with their times
CHOSEN = "catalogue model"
NONE, HOW = "No engine has reported a model yet.", "Start an engine, and name it to the gateway with `--engine`."
STATUSES = {"ready": colours.GOOD, "asleep": colours.NEUTRAL, "unavailable": colours.BAD}


def draw(page: Page) -> None:
    page.live(draw_models)
    with page.asking("catalogue model") as client:
        draw_one(client)


def draw_models(client: AdminClient) -> None:
    is_of_one = session.is_of_one_tenant()  # the load of engines and other tenants are not its business
    costs = "and what they cost" if is_of_one else "what they cost, and who may use them"
    panels.head("Catalogue", f"Served models: what they can do, {costs}")
    answer = client.get("/models")
    models = answer.data["data"]
    usual = frames.usual_class_of(models)
    frame = frames.models_frame(models, usual, watch_rates(models))
    panels.tiles(tiles(models), [answer], key="catalogue figures")
    note = f"prices of the class {usual}, in dollars per million tokens{'' if is_of_one else '; load now'}"
    with panels.panel("Models", note, [answer], key="models", frame=frame):
        shown = columns()
        if is_of_one:
            for name in ("running", "waiting", "replicas", "output_per_s", "tenants"):
                del shown[name]
        panels.table(frame, shown, f"{NONE}{session.advice(HOW, session.DEPLOYS)}", states=STATUSES, max_rows=12)


def tiles(models: Sequence[Mapping[str, Any]]) -> list[Tile]:
    loads = [one["load"] for one in models if one["load"]]
    ready = sum(one["status"] == "ready" for one in models)
    found = [
        Tile("Models", f"{len(models)}", f"{ready} ready"),
        Tile("Adapters", f"{sum(len(one['adapters']) for one in models)}", "LoRA, ready"),
        Tile("Without a price", f"{sum(not one['prices'] for one in models)}", "requests are free of charge"),
    ]
    if loads:
        waiting = sum(load["num_waiting"] for load in loads)
        found.append(Tile("Running, now", short(sum(load["num_running"] for load in loads)), f"{waiting} waiting"))
    return found


def watch_rates(models: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return each model's output tokens per second between the last two refreshes; None without two."""
    seen: dict[str, list[tuple[float, int]]] = st.session_state.setdefault(TOTALS, {})
    rates: dict[str, float | None] = {}
    now_s = time.monotonic()
    for one in models:
        if not one["load"]:
            continue
        points = [*seen.get(one["model"], []), (now_s, one["load"]["output_tokens_total"])][-2:]
        seen[one["model"]] = points
        (before_s, before), (at_s, total) = points[0], points[-1]
        is_known = at_s > before_s and total >= before  # an engine that restarts counts from 0
        rates[one["model"]] = (total - before) / (at_s - before_s) if is_known else None
    return rates


def draw_one(client: AdminClient) -> None:
    """Draw the prices by class of one model, and the tenants that may use it."""
    answer = client.get("/models")
    models = {one["model"]: one for one in answer.data["data"]}
    if not models:
        return
    chosen = st.selectbox("Model", list(models), key=CHOSEN)
    model = models.get(chosen) or next(iter(models.values()))
    priced, users = frames.class_prices_frame(model), frames.users_frame(model)
    inks = colours.of_classes(sorted({*priced["class"], *users["class"]}))
    is_of_one = session.is_of_one_tenant()
    left, right = (st.container(), None) if is_of_one else st.columns(2)
    with (
        left,
        panels.panel("Prices by class", "dollars per million tokens", [answer], key="class prices", frame=priced),
    ):
        panels.table(priced, price_columns(), "This model has no price: its requests are free of charge.", classes=inks)
    if right is None:
        may = "A valid key of your tenant" if len(users) else "No valid key of your tenant"
        st.caption(f"{may} allows this model.")
    else:
        shown = f"the first {len(users)} of {model['num_tenants']}" if len(users) < model["num_tenants"] else "by name"
        note = f"tenants with a valid key that allows the model, {shown}"
        with right, panels.panel("Who may use it", note, [answer], key="model users", frame=users):
            none = "No tenant has a valid key that allows this model."
            panels.table(users, {"tenant": "Tenant", "class": "Best class"}, none, classes=inks)
    routes, adapters = ", ".join(model["routes"]), ", ".join(model["adapters"])
    st.caption(f"Routes: {as_text(routes or 'none')}")
    st.caption(f"Adapters: {as_text(adapters or 'none')}")


def columns() -> dict[str, Any]:
    column = st.column_config
    price = "of a million tokens in this class"
    return {
        "model": column.TextColumn("Model", width=150),
        "status": "Status",
        "context": panels.count_column("Context", tooltip="Most tokens of prompt and answer"),
        "input": column.NumberColumn("Input, $", format="%.4g", help=price),
        "output": column.NumberColumn("Output, $", format="%.4g", help=price),
        "running": panels.count_column("Running"),
        "waiting": panels.count_column("Waiting"),
        "replicas": column.TextColumn("Replicas", help="That accept requests, of all"),
        "output_per_s": column.NumberColumn("Output tok/s", format="%,.0f", help="Since the last refresh"),
        "tenants": panels.count_column("Tenants", tooltip="With a valid key that allows the model"),
        "features": column.TextColumn("Features", width=270),
        "routes": "Routes",
        "adapters": panels.count_column("Adapters"),
        "family": "Family",
    }


def price_columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "class": "Class",
        "input": column.NumberColumn("Input, $", format="%.6g"),
        "cached_input": column.NumberColumn("Cached input, $", format="%.6g"),
        "output": column.NumberColumn("Output, $", format="%.6g"),
    }
