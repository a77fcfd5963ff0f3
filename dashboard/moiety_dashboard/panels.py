"""Building blocks of all pages: panels with their query and data, figures, and confirmations of dangerous actions."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st
from pandas.api.types import is_integer_dtype

from moiety_dashboard import colours, session
from moiety_dashboard.client import AdminClient, Answer, ApiError
from moiety_dashboard.column_widths import too_narrow
from moiety_dashboard.escaping import as_text, csv_of

TENANT = "tenant"  # column of the tenants' names
ROW_HEIGHT = 36  # pixels of a table row
STYLE = """
<style>
  [data-testid="stMainBlockContainer"] { max-width: 1320px; padding: 2.4rem 2rem 3rem; }
  [data-testid="stMetricValue"] { font-variant-numeric: tabular-nums; font-weight: 600; font-size: 1.55rem; }
  /* tiles and inputs that do not fit in one row wrap to the next; tiles keep the width of those above them */
  [data-testid="stHorizontalBlock"]:has(
    > [data-testid="stColumn"] > div > div > div > [data-testid="stElementContainer"] > [data-testid="stMetric"]
  ) { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); }
  [data-testid="stColumn"]:has(
    > div > div > div > [data-testid="stElementContainer"] > [data-testid="stMetric"]
  ) { min-width: 0; width: auto; }
  @media (max-width: 1199px) {  /* four are two rows of two */
    [data-testid="stHorizontalBlock"]:has(
      > [data-testid="stColumn"]:nth-child(4):last-child > div > div > div > [data-testid="stElementContainer"]
      > [data-testid="stMetric"]
    ) { grid-template-columns: repeat(2, 1fr); }
  }
  @media (min-width: 1200px) {  /* seven or eight are two rows of four */
    [data-testid="stHorizontalBlock"]:has(
      > [data-testid="stColumn"]:nth-child(7) > div > div > div > [data-testid="stElementContainer"]
      > [data-testid="stMetric"]
    ) { grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); }
  }
  [data-testid="stColumn"]:has(
    > * [data-testid="stSelectbox"], > * [data-testid="stTextInput"], > * [data-testid="stNumberInput"],
    > * [data-testid="stButton"]
  ) { min-width: 9rem; }
  /* charts and tables beside each other need the width of their axes, legends and columns */
  [data-testid="stColumn"]:has(> * [data-testid="stVegaLiteChart"], > * [data-testid="stDataFrame"]) {
    min-width: 25rem;
  }
  [data-testid="stMetricLabel"] p { font-size: 0.82rem; opacity: 0.8; }
  [data-testid="stSidebarHeader"] { height: 2.5rem; }
  [data-testid="stPopover"] button { min-height: 1.5rem; padding: 0 0.4rem; }
  h1 { letter-spacing: -0.02em; padding: 0 !important; font-size: 1.7rem !important; }
  h3 { padding: 0.6rem 0 0 !important; font-size: 1.1rem !important; }
  /* parts that refresh every few seconds must not fade while they do */
  [data-stale="true"] { opacity: 1 !important; transition: none !important; }
  /* the sign of a running script is shown once it has run for a second: refreshes are shorter */
  [data-testid="stStatusWidget"] { visibility: hidden; animation: shown-late 0s linear 1s forwards; }
  @keyframes shown-late { to { visibility: visible; } }
  [data-testid="stDataFrame"][data-hidden-columns="true"] { position: relative; overflow: visible; }
  /* the margin is that of the container, whose height can be fixed */
  [data-testid="stElementContainer"]:has([data-hidden-columns="true"]) { margin-bottom: 1.4rem; }
  /* the picture that redeems the ticket of a sign-in takes no place */
  [data-testid="stElementContainer"]:has(img[src*="moiety-session"]) { position: absolute; }
  [data-testid="stDataFrame"][data-hidden-columns="true"]::after {
    content: "Some columns are hidden, scroll sideways" attr(data-hidden-names); position: absolute; right: 0;
    bottom: -1.3rem; max-width: 100%; overflow: hidden; white-space: nowrap; text-overflow: ellipsis;
    font-size: 0.75rem; opacity: 0.8;
  }
  /* the names of a table's columns take no place */
  [data-testid="stElementContainer"]:has([data-column-names]) { position: absolute; }
</style>
"""
# a table scrolls inside, and only the browser knows its width; the first or last column may be visible in part
MARK_HIDDEN_COLUMNS = """
<script>
  if (!window.marksHiddenColumns) {
    window.marksHiddenColumns = true;
    const hiddenNames = (table, inside) => {
      const given = table.closest('[data-testid="stElementContainer"]')?.previousElementSibling;
      const names = JSON.parse(given?.querySelector("[data-column-names]")?.dataset.columnNames ?? "[]");
      const seen = [...table.querySelectorAll("canvas th")].map((one) => one.textContent);
      const first = names.indexOf(seen[0]), last = names.indexOf(seen[seen.length - 1]);
      if (first < 0 || last < 0) return "";
      const before = inside.scrollLeft > 1 ? names.slice(0, Math.max(first, 1)) : [];
      const isAtEnd = inside.scrollLeft + inside.clientWidth >= inside.scrollWidth - 1;
      const after = isAtEnd ? [] : names.slice(Math.min(last + 1, names.length - 1));
      return ": " + [...before, ...after].join(" · ");
    };
    setInterval(() => {
      for (const table of document.querySelectorAll('[data-testid="stDataFrame"]')) {
        const inside = table.querySelector(".dvn-scroller");
        const hides = inside !== null && inside.scrollWidth > inside.clientWidth + 1;
        const marks = { hiddenColumns: String(hides), hiddenNames: hides ? hiddenNames(table, inside) : "" };
        for (const [name, mark] of Object.entries(marks))
          if (table.dataset[name] !== mark) table.dataset[name] = mark;
      }
    }, 400);
  }
</script>
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure: label, value with its unit, and its time range or reference."""

    label: str
    value: str
    note: str
    help: str | None = None
    history: Sequence[float] | None = None


def head(title: str, purpose: str) -> None:
    """Draw a page's title and purpose."""
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    left.title(as_text(title), anchor=False)
    left.caption(as_text(purpose))
    state = session.gateway_state()
    if state.is_away:
        draw_stale_badge()
    if not state.is_away or state.last_response is not None:
        at = datetime.now(UTC) if not state.is_away or state.last_response is None else state.last_response
        right.caption(f"as of {at.astimezone(session.zone()):%H:%M:%S %Z}", text_alignment="right")


def draw_stale_badge() -> None:
    """Say that the gateway does not respond, and since when what is shown is stale."""
    last = session.gateway_state().last_response
    since = "" if last is None else f" since {last.astimezone(session.zone()):%H:%M:%S %Z}"
    st.badge(f"Stale: the gateway does not respond{since}", icon=":material/cloud_off:", color="red")


def tiles(figures: Sequence[Tile], answers: Sequence[Answer] = (), *, key: str = "figures") -> None:
    """Draw a row of figures; the button at its end shows their queries, if they have any."""
    row = st.container(horizontal=True, gap="xsmall")
    for column, tile in zip(row.columns(len(figures), gap="small"), figures, strict=True):
        with column.container(border=True, height="stretch", gap=None):
            history = None if tile.history is None or len(tile.history) < 2 else list(tile.history)
            help_text = None if tile.help is None else as_text(tile.help)
            st.metric(as_text(tile.label), as_text(tile.value), help=help_text, chart_data=history, chart_type="area")
            st.caption(as_text(tile.note))
    if answers:
        with row:
            _more(answers, key, None)


@contextmanager
def panel(
    title: str, note: str, answers: Sequence[Answer], *, key: str, frame: pd.DataFrame | None = None
) -> Iterator[None]:
    """Draw a bordered part of a page; its button shows its queries, and its data as CSV."""
    with st.container(border=True, gap="xsmall"):
        row = st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center")
        row.markdown(f"**{as_text(title)}**  :small[:gray[{as_text(note)}]]")
        with row:
            _more(answers, key, frame)
        yield


def _more(answers: Sequence[Answer], key: str, frame: pd.DataFrame | None) -> None:
    with st.popover(":material/more_horiz:", type="tertiary", key=f"{key} more", help="Query and data"):
        st.caption("The API query of this panel. Run it in a shell with an administrator's key.")
        for answer in answers:
            st.code(answer.query, language="bash", wrap_lines=True)
        if any(answer.truncated for answer in answers):
            st.caption("The list is truncated. Narrow it with the parameters of the query.")
        if frame is not None:
            _offer(frame, key)


def _offer(frame: pd.DataFrame, key: str) -> None:
    name = f"moiety-{key.replace(' ', '-')}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.csv"
    st.download_button(
        "Download CSV",
        lambda: csv_of(frame),
        name,
        "text/csv",
        key=f"{key} csv",
        on_click="ignore",
        icon=":material/download:",
    )


def draw(chart: Callable[[], alt.Chart], frame: pd.DataFrame, empty: str, key: str) -> None:
    """Draw a chart, or instructions for how to get data for it."""
    if frame.empty:
        st.caption(empty)
    else:
        st.altair_chart(chart(), width="stretch", key=key)


def table(
    frame: pd.DataFrame,
    columns: Mapping[str, Any],
    empty: str,
    *,
    classes: Mapping[str, str] | None = None,
    states: Mapping[str, str] | None = None,
    max_rows: int = 10,
    on_pick: Callable[[int], None] | None = None,
) -> None:
    """Draw a table, or instructions for how to get rows; classes and states have their colours.

    `max_rows` are visible at once. A click on a row selects it. A user of one tenant sees no column of tenants.
    """
    if frame.empty:
        st.caption(empty)
        return
    is_shown = {name: name in frame.columns and not (name == TENANT and session.is_of_one_tenant()) for name in columns}
    shown: Any = frame[[name for name in columns if is_shown[name]]]
    inks = {"class": classes or {}, **dict.fromkeys(("state", "status", "outcome"), states or STATES)}
    styled = shown
    for name, ink in inks.items():
        if name in shown.columns:  # a frame without inks is drawn as it is, which takes a third of the time
            styled = styled.style if styled is shown else styled
            styled = styled.map(lambda value, ink=ink: _ink(ink.get(str(value).split(":")[0])), subset=[name])
    height: Any = "content" if len(frame) <= max_rows else ROW_HEIGHT * (max_rows + 1)
    more: dict[str, Any] = {"hide_index": True, "width": "stretch", "height": height, "placeholder": "–"}
    if on_pick is not None:
        more |= {"on_select": lambda: _picked(on_pick), "selection_mode": "single-cell", "key": PICKING}
    write_column_names(columns[name] for name in shown.columns)
    st.dataframe(styled, column_config=configured(shown, columns), **more)


def write_column_names(columns: Iterable[Any]) -> None:
    """Write the columns' labels where no person sees them, for the note below the next table if it hides some."""
    labels = [column if isinstance(column, str) else column["label"] for column in columns]
    st.html(f"<span data-column-names='{html.escape(json.dumps(labels))}'></span>")


def configured(frame: pd.DataFrame, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns with the width of their longest text, and with the separators of integers."""
    widths = too_narrow(frame, columns)
    return {
        name: _configured(given, name in frame.columns and is_integer_dtype(frame[name].dtype), widths.get(name))
        for name, given in columns.items()
    }


def _configured(given: Any, is_integer: bool, width: int | None) -> Any:
    if isinstance(given, str) and not is_integer:
        return given if width is None else {**st.column_config.TextColumn(width=width), "label": given}
    column: Any = {**st.column_config.NumberColumn(), "label": given} if isinstance(given, str) else given
    kind = column["type_config"]
    if is_integer and kind["type"] == "number" and kind["format"] is None:
        column = {**column, "type_config": {**kind, "format": "localized"}}
    return column if width is None else {**column, "width": width}


def count_column(label: str, tooltip: str | None = None) -> Any:
    """Return a column of integers with separators."""
    return st.column_config.NumberColumn(label, format="localized", help=tooltip)


def time_column(label: str, shown: str, width: int | None = None) -> Any:
    """Return a column of times in the user's time zone."""
    return st.column_config.DatetimeColumn(label, format=shown, timezone=session.zone().key, width=width)


PICKING = "row picked"


def _picked(on_pick: Callable[[int], None]) -> None:
    cells = st.session_state[PICKING]["selection"]["cells"]
    if cells:
        on_pick(cells[0][0])


STATES = {
    "active": colours.GOOD,
    "ready": colours.GOOD,
    "live": colours.GOOD,
    "suspended": colours.WARN,
    "draining": colours.WARN,
    "falling asleep": colours.WARN,
    "asleep": colours.NEUTRAL,
    "waking": colours.WARN,
    "expired": colours.WARN,
    "invited": colours.WARN,
    "disabled": colours.BAD,
    "quarantined": colours.WARN,
    "revoked": colours.BAD,
    "unavailable": colours.BAD,
}


def _ink(colour: str | None) -> str:
    return "" if colour is None else f"color: {colour}; font-weight: 600"


def chips(names: Mapping[str, str]) -> None:
    """Draw the classes and their colours."""
    dots = "".join(
        f'<span style="margin-right:1.1rem;white-space:nowrap"><span style="display:inline-block;width:.65rem;'
        f'height:.65rem;border-radius:50%;background:{html.escape(colour)};margin-right:.4rem"></span>{html.escape(name)}</span>'
        for name, colour in names.items()
    )
    st.html(f'<div style="font-size:.85rem">{dots}</div>')


def show_once(key: str, note: str, code_of: Callable[[str], str] = str, *, wraps: bool = False) -> None:
    """Show a new secret of the session below a note, until it is dismissed."""
    secret = st.session_state.get(key)
    if secret is None:
        return
    with st.container(border=True):
        st.markdown(note)
        st.code(code_of(secret), language=None, wrap_lines=wraps)
        st.button("Done", type="primary", on_click=forget_secret, args=(key,))


def forget_secret(key: str) -> None:
    """Forget a secret that was shown. As a callback this happens also if the user opens another page at once."""
    st.session_state.pop(key, None)


def attempt(change: Callable[[], Any], done: str) -> Any:
    """Run the change; show success on the redrawn page, or the error here. Return None if it failed."""
    try:
        result = change()
    except ApiError as exc:
        st.error(as_text(exc), icon=":material/error:")
        return None
    session.notify(done)
    return {} if result is None else result


@st.dialog("Are you sure?")
def ask_first(what: str, button: str, change: Callable[[], Any], done: str) -> None:
    """Ask for confirmation, and run the change if the answer is yes."""
    st.markdown(what)
    yes, no = st.columns(2)
    if yes.button(button, type="primary", width="stretch") and attempt(change, done) is not None:
        st.rerun()
    if no.button("Cancel", width="stretch"):
        st.rerun()


def ask_deletion(client: AdminClient, path: str, what: str, done: str) -> None:
    """Ask for confirmation, and delete the object of the path if the answer is yes."""
    ask_first(what, "Delete", lambda: client.change("DELETE", path), done)


def choose_deletion(client: AdminClient, noun: str, labels: Mapping[str, str], effect: str) -> None:
    """Draw the choice of an object to delete. `labels` are by path; `effect` is a sentence that the question has."""
    with st.container(border=True):
        st.markdown(f"**Delete a {noun}**")
        if not labels:
            st.caption(f"There is no {noun}.")
            return
        path = st.selectbox(f"The {noun} to delete", list(labels), format_func=lambda one: labels[one])
        if st.button(f"Delete {noun}", icon=":material/delete:"):
            question = f"Delete the {noun} **{as_text(labels[path])}**? {effect}"
            ask_deletion(client, path, question, f"The {noun} is deleted.")


def may_change(action: str, objects: str, verbs: str = "change") -> bool:
    """Return whether the role allows the action; if not, draw a note that the objects can only be viewed."""
    is_allowed = session.may(action)
    if not is_allowed:
        st.caption(f"Your role can view {objects}, but not {verbs} them.")
    return is_allowed


def put(client: AdminClient, path: str, body: Mapping[str, Any], what: str) -> None:
    """Set an object that requests obey from then on, and draw the page again if the gateway accepts it."""
    done = f"{what} is set; it applies to requests that begin from now on."
    if attempt(lambda: client.change("PUT", path, body), done) is not None:
        st.rerun()


def form_key(name: str) -> str:
    """Return the key of a form, whose fields are empty again after `clear_form`."""
    return f"{name} {st.session_state.get(_cleared(name), 0)}"


def clear_form(name: str) -> None:
    """Empty the fields of a form from the next drawing on: its object is made, and another press makes no second."""
    st.session_state[_cleared(name)] = st.session_state.get(_cleared(name), 0) + 1


def _cleared(name: str) -> str:
    return f"times that the form was cleared: {name}"
