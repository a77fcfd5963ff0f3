"""Widths of columns whose longest text the browser would cut."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from moiety_dashboard import panels
from moiety_dashboard.column_widths import MOST_PX, too_narrow, width_of
from moiety_dashboard.views import batches, guardrails, requests, routes, runs, simulator
from moiety_dashboard.views.traces import page as traces

SHORT = ["acme", "hooli", "globex", "initech", "demo", "research"]


def test_a_text_that_is_much_longer_than_the_others_gets_its_width() -> None:
    key = "key globex / production / laptop …bUYq"
    frame = pd.DataFrame({"scope": [*SHORT, key], "cost": range(7)})
    assert too_narrow(frame, {"scope": "Scope", "cost": "Cost"}) == {"scope": width_of([key])}
    assert too_narrow(frame.head(6), {"scope": "Scope"}) == {}


def test_a_text_beyond_the_measured_rows_gets_its_width() -> None:
    frame = pd.DataFrame({"name": ["acme"] * 9 + ["umbrella"] + ["acme"] * 5})
    assert too_narrow(frame, {"name": st.column_config.TextColumn("Name")}) == {"name": width_of(["umbrella"])}


COLUMNS_OF_NAMES = [
    (requests.columns(), "request_id"),
    (traces.columns(pd.DataFrame()), "request_id"),
    (runs.columns(), "name"),
    (batches.columns(), "project"),
    (routes.columns(), "targets"),
    (guardrails.columns(), "check"),
]


@pytest.mark.parametrize(("columns", "name"), COLUMNS_OF_NAMES)
def test_request_ids_and_names_have_the_width_of_their_texts(columns: dict[str, Any], name: str) -> None:
    config = columns[name]
    assert isinstance(config, str) or config["width"] is None


def test_a_tenant_takes_no_more_than_its_share_and_a_set_width_stays() -> None:
    frame = pd.DataFrame({"tenant": [*SHORT, "Gesellschaft für Sprachmodelle und Datenverarbeitung"]})
    assert too_narrow(frame, {"tenant": "Tenant"}) == {"tenant": MOST_PX["tenant"]}
    assert too_narrow(frame, {"tenant": st.column_config.TextColumn("Tenant", width="medium")}) == {}


def test_columns_without_texts_and_empty_frames_have_no_width() -> None:
    frame = pd.DataFrame({"tenant": [None, 3, "a"]})
    assert too_narrow(frame, {"tenant": "Tenant", "absent": "Absent"}) == {}
    assert too_narrow(frame.head(0), {"tenant": "Tenant"}) == {}


def test_integers_have_separators_and_long_texts_their_width_whatever_the_page_gives() -> None:
    column = st.column_config
    frame = pd.DataFrame({"tenant": [*SHORT, "x" * 40], "admitted": range(7), "seq": range(7), "share": [0.5] * 7})
    given = {
        "tenant": "Tenant",
        "admitted": "Admitted",
        "seq": column.NumberColumn("No.", format="%d"),
        "share": "Share",
    }
    found = panels.configured(frame, given)
    assert found["tenant"] == column.TextColumn("Tenant", width=MOST_PX["tenant"])
    assert found["admitted"] == column.NumberColumn("Admitted", format="localized")
    assert (found["seq"], found["share"]) == (given["seq"], "Share")


def table_of_tenants() -> None:
    """Script of a page with a table."""
    import pandas as pd

    from moiety_dashboard import panels

    panels.table(pd.DataFrame({"tenant": ["acme"], "cost": [1.5]}), {"tenant": "Tenant", "cost": "Cost"}, "none")


@pytest.mark.parametrize(("tenant_id", "columns"), [(None, ["tenant", "cost"]), ("ten_1", ["cost"])])
def test_users_of_one_tenant_see_no_column_of_tenants(tenant_id: str | None, columns: list[str]) -> None:
    app = AppTest.from_function(table_of_tenants, default_timeout=120)
    app.session_state["caller"] = {"tenant_id": tenant_id}
    app.run()
    assert not app.exception
    assert list(app.dataframe[0].value.columns) == columns


def test_headings_of_editable_columns_have_space_for_their_icon() -> None:
    for column in simulator.term_columns([]).values():
        if column["type_config"]["type"] == "number" and column["label"] != "Rank":
            assert column["width"] >= width_of([column["label"]]) + 20, column["label"]
