"""Routes: aliases, weighted targets, fallbacks, downgrades and shadow traffic. Set, replace and delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_with
from moiety_dashboard.escaping import as_text
from moiety_dashboard.frames.rules import routes_frame
from moiety_dashboard.page import Page

NEW = "new route"
NONE, HOW = "No route is set: requests are answered by the model that they name.", "Set one below."
STICKY = {"none": "nothing", "tenant": "each tenant", "conversation": "each conversation"}
EFFECT = "Requests for this name then go to the model of that name, if there is one."  # of a deletion


def draw(page: Page) -> None:
    panels.head("Routes", "Models that answer the requests for a name")
    with page.asking() as client:
        answer = client.get("/routes")
        routes = answer.data["data"]
        frame = routes_frame(routes)
        with panels.panel("Routes", "shares of requests by weight", [answer], key="routes", frame=frame):
            none = f"{NONE}{session.advice(HOW, 'routes.write')}"
            panels.table(frame, columns(), none, max_rows=16)
        if not panels.may_change("routes.write", "routes"):
            return
        left, right = st.columns([3, 2])
        with left:
            ask_route(client, routes)
        with right:
            labels = {path_with("/routes", route=one["name"]): one["name"] for one in routes}
            panels.choose_deletion(client, "route", labels, EFFECT)


def ask_route(client: AdminClient, routes: Sequence[Mapping[str, Any]]) -> None:
    """Draw the fields of a new route, or of one that is replaced."""
    models = [one["model"] for one in client.get("/models").data["data"]]
    with st.container(border=True):
        st.markdown("**Set a route**")
        chosen = st.selectbox("Route", [NEW, *(one["name"] for one in routes)], key="chosen route")
        known = next((one for one in routes if one["name"] == chosen), {})
        name = known.get("name") or st.text_input("Name", placeholder="best", key="route name").strip()
        body = {"name": name, **ask_terms(models, known, key=f"route {chosen}")}
        if st.button("Set route", type="primary"):
            panels.put(client, "/routes", body, f"The route {name}")


def ask_terms(models: Sequence[str], known: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the fields of a route but its name. `known` are those that it has; widgets have the names of `key`."""
    weights = {one["model"]: int(one["weight"]) for one in known.get("targets", ())}
    options = list(dict.fromkeys([*models, *weights, *known.get("fallbacks", ())]))
    targets = st.multiselect(
        "Targets", options, list(weights), accept_new_options=True, placeholder="models", key=f"{key} targets"
    )
    shares = [1] if len(targets) == 1 else []
    if len(targets) > 1:
        for place, model in zip(st.columns(len(targets)), targets, strict=True):
            weight = weights.get(model, 1)
            shares.append(
                place.number_input(f"Weight of {as_text(model)}", 0, 1_000_000, weight, key=f"{key} weight {model}")
            )
    fallbacks = st.multiselect(
        "Fallbacks, in this order", options, known.get("fallbacks", []), accept_new_options=True, placeholder="none",
        key=f"{key} fallbacks",
    )  # fmt: skip
    kinds = list(STICKY)
    sticky = st.selectbox(
        "Keeps its target", kinds, kinds.index(known.get("sticky", "none")), format_func=lambda kind: STICKY[kind],
        key=f"{key} sticky",
    )  # fmt: skip
    found: dict[str, Any] = {
        "targets": [{"model": model, "weight": share} for model, share in zip(targets, shares, strict=True)],
        "fallbacks": fallbacks,
        "sticky": sticky,
    }
    for field, label, percent_label, usual in (
        ("downgrade", "Downgrade to", "from this % of a quota", 90),
        ("shadow", "Copies to (shadow)", "of this % of requests", 5.0),
    ):
        left, right = st.columns(2)
        given = known.get(f"{field}_model")
        listed = list(dict.fromkeys([*options, *([given] if given else [])]))
        model = left.selectbox(
            label, listed, listed.index(given) if given else None, accept_new_options=True, placeholder="nothing",
            key=f"{key} {field}",
        )  # fmt: skip
        least, most = (1, 100) if isinstance(usual, int) else (0.001, 100.0)
        percent = right.number_input(
            percent_label, least, most, known.get(f"{field}_percent") or usual, key=f"{key} {field} percent"
        )
        found |= {f"{field}_model": model, f"{field}_percent": percent if model else None}
    return found


def columns() -> dict[str, Any]:
    column = st.column_config
    return {
        "name": column.TextColumn("Name", help="The model that clients ask for"),
        "targets": "Targets",
        "fallbacks": "Fallbacks",
        "sticky": column.TextColumn("Sticky", help="What keeps its target while the weights stay the same"),
        "downgrade": column.TextColumn("Downgrade", help="Model from this share of a quota on"),
        "shadow": column.TextColumn("Shadow", help="Model that gets copies of requests, not billed"),
    }
