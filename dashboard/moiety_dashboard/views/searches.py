"""A search in stored records: filters, the results as drawn, the clicked row, and the buttons between pages.

A search does not know what it finds. It keeps its state in the session under keys that begin with its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

from moiety_dashboard import colours, panels, session
from moiety_dashboard.client import AdminClient, Answer
from moiety_dashboard.escaping import show_unseen

OUTCOMES = {
    "stop": "stop", "length": "length", "content_filter": "content filter", "disconnected": "client disconnected",
    "rejected": "rejected", "failed": "failed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredSearch:
    """A search of one page of the dashboard; `id_column` identifies a row, and `limit` is the number of rows a page."""

    name: str
    path: str
    id_column: str
    limit: int

    @property
    def picked(self) -> str | None:
        """The id of the row that was clicked last, or None."""
        row_id: str | None = st.session_state.get(self.key("picked"))
        return row_id

    def forget_picked(self) -> None:
        st.session_state.pop(self.key("picked"), None)

    def pick_row(self, row: int) -> None:
        """Choose a row of the table as it was drawn when it was clicked."""
        shown: list[str] = st.session_state.get(self.key("rows"), [])
        if row < len(shown):
            st.session_state[self.key("picked")] = shown[row]

    def ask(self, client: AdminClient, filters: Mapping[str, Any]) -> Answer:
        """Return the page of results that the person turned to; other filters begin at the newest.

        While a row is picked the results stay as they were, so that the picked row stays where it is marked.
        """
        asked = _lasting(filters), self.cursor(filters)
        known: tuple[Any, Answer] | None = st.session_state.get(self.key("answer"))
        if self.picked is not None and known is not None and known[0] == asked:
            return known[1]
        answer = client.get(self.path, limit=self.limit, cursor=asked[1], **filters)
        st.session_state[self.key("answer")] = asked, answer
        return answer

    def cursor(self, filters: Mapping[str, Any]) -> str | None:
        """Return the cursor of the page that the person turned to; None for the newest."""
        position = st.session_state.get(self.key("position"))
        return position[1] if position is not None and position[0] == _lasting(filters) else None

    def key(self, what: str) -> str:
        """Return the key of a value in the session's state."""
        return f"{self.name} {what}"


def draw_table(search: StoredSearch, frame: pd.DataFrame, columns: Mapping[str, Any], empty: str) -> None:
    """Draw the results; a click on a row picks it."""
    st.session_state[search.key("rows")] = list(frame[search.id_column])
    classes = colours.of_classes(sorted(set(frame["class"])))
    panels.table(
        frame, columns, empty, classes=classes, states=colours.OUTCOMES, max_rows=16, on_pick=search.pick_row
    )  # fmt: skip


def draw_buttons(search: StoredSearch, older: str | None, filters: Mapping[str, Any]) -> None:
    """Draw the buttons to older results and to the newest. `older` is the answer's next cursor."""
    left, right, _ = st.columns([1, 1, 3])
    icon = ":material/chevron_left:"
    if left.button("Older", icon=icon, disabled=older is None, width="stretch", key=search.key("older")):
        st.session_state[search.key("position")] = (_lasting(filters), older)
        search.forget_picked()
        st.rerun()
    label = "Refresh" if search.cursor(filters) is None else "Newest"
    if right.button(label, icon=":material/refresh:", width="stretch", key=search.key("newest")):
        for what in ("position", "answer"):
            st.session_state.pop(search.key(what), None)
        st.rerun()


def places_of(*rows: Sequence[int]) -> Iterator[Any]:
    """Return the places of fields in rows; each row has the relative widths of its places."""
    for widths in rows:
        yield from st.columns(widths)


def choose_tenant(search: StoredSearch, places: Iterator[Any], names: Mapping[str, str]) -> str | None:
    """Draw the choice of a tenant in the next place; a person of one tenant has none, and takes no place."""
    if session.is_of_one_tenant():
        return None
    tenants = sorted((one for one in names if one.startswith("ten_")), key=lambda one: names[one])
    return choose(search, next(places), "Tenant", tenants, names)


def choose(
    search: StoredSearch,
    container: Any,
    label: str,
    options: list[str],
    names: Mapping[str, str] | None = None,
    *,
    more: bool = False,
    help_text: str | None = None,
) -> str | None:
    """Draw the choice of one option or any; `more` accepts options that are not listed."""
    chosen: str | None = container.selectbox(
        label, options, None, format_func=lambda one: show_unseen((names or {}).get(one, one)), placeholder="any",
        key=search.key(label.lower()), accept_new_options=more, help=help_text,
    )  # fmt: skip
    return chosen


def enter(search: StoredSearch, container: Any, label: str, example: str) -> str | None:
    """Draw a field for a text; returns None if it is empty."""
    given: str = container.text_input(label, key=search.key(label.lower()), placeholder=example)
    return given.strip() or None


def enter_least_duration(search: StoredSearch, container: Any) -> int | None:
    """Draw the field for the shortest duration, in milliseconds."""
    least: int | None = container.number_input(
        "Min duration, ms", 0, value=None, step=100, placeholder="0", key=search.key("min")
    )
    return least or None


def _lasting(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters without the start of the window, which moves with the clock."""
    return {name: value for name, value in filters.items() if name != "since"}
