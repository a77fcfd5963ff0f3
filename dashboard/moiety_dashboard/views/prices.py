"""Prices per million tokens, by model and class: set and delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient, path_with
from moiety_dashboard.frames.catalogue import prices_frame
from moiety_dashboard.page import Page
from moiety_dashboard.views.catalogue import price_columns

ALL_CLASSES = "all classes"
NONE, HOW = "No price is set: all requests are free of charge.", "Set one below."
EFFECT = "Requests without a price are free of charge."  # of a deletion


def draw(page: Page) -> None:
    panels.head("Prices", "Dollars per million tokens, by model and class")
    with page.asking() as client:
        answer = client.get("/prices")
        prices = answer.data["data"]
        frame = prices_frame(prices)
        note = "a price for all classes is multiplied by the price factor of each class"
        with panels.panel("Prices", note, [answer], key="prices", frame=frame):
            none = f"{NONE}{session.advice(HOW, 'prices.write')}"
            panels.table(frame, {"model": "Model", **price_columns()}, none, max_rows=16)
        if not panels.may_change("prices.write", "prices"):
            return
        left, right = st.columns(2)
        with left:
            ask_price(client)
        with right:
            panels.choose_deletion(client, "price", {path_of_price(one): label_of(one) for one in prices}, EFFECT)


def ask_price(client: AdminClient) -> None:
    classes = [one["name"] for one in client.get("/classes").data["data"]]
    models = [one["model"] for one in client.get("/models").data["data"]]
    with st.form("set price", border=True):
        st.markdown("**Set a price**")
        model = st.selectbox("Model", models, None, accept_new_options=True, placeholder="name of the model")
        service_class = st.selectbox("Class", [ALL_CLASSES, *classes])
        first, second, third = st.columns(3)
        fields = {
            "input": first.text_input("Input, $", placeholder="0.15"),
            "cached_input": second.text_input("Cached input, $", placeholder="same as input"),
            "output": third.text_input("Output, $", placeholder="0.60"),
        }
        if st.form_submit_button("Set price", type="primary"):
            given = {name: text.strip() for name, text in fields.items() if text.strip()}
            body = {"model": model or "", **given}
            if service_class != ALL_CLASSES:
                body["service_class"] = service_class
            panels.put(client, "/prices", body, f"The price of {body['model']}")


def path_of_price(price: Mapping[str, Any]) -> str:
    return path_with("/prices", model=price["model"], service_class=price["service_class"])


def label_of(price: Mapping[str, Any]) -> str:
    return f"{price['model']}, {price['service_class'] or ALL_CLASSES}"
