"""Text of other users is shown as text, and opens in a spreadsheet as text."""

from __future__ import annotations

import csv
import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from moiety_dashboard.escaping import as_text, csv_of, show_unseen_in

HOSTILE = (
    "![p](http://evil.example/key.png) [x](http://evil.example) **b** :red[r] :material/key: $x^2$ :smile: <b>h</b> "
    "# t | ~~s~~ www.evil.example a@evil.example http://evil.example `c` -> --"
)
FORMULAS = ["=1+1", "+1+1", "-1+cmd", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"]


def rendered(text: str) -> list[str]:
    """Return the types of the nodes below the paragraph when the text is rendered as Markdown."""
    parser = MarkdownIt("gfm-like", {"linkify": False, "html": True})
    return [child.type for token in parser.parse(text) for child in token.children or ()]


@given(st.text(st.characters(exclude_categories=["C"]), min_size=1).filter(str.strip) | st.just(HOSTILE))
def test_any_text_renders_as_itself_and_nothing_else(text: str) -> None:
    escaped = as_text(text)
    assert set(rendered(f"Revoke **a{escaped}a**?")) <= {"text", "strong_open", "strong_close", "text_special"}
    assert not set(escaped) & set("![]()<>*_`$|~:\\\n@/-")


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_is_text_in_a_csv_and_numbers_stay_numbers(formula: str) -> None:
    frame = pd.DataFrame({formula: [formula, "plain"], "n": [-1, 2], "x": [-1.5, np.nan], "t": ["-1", "+2.5e3"]})
    heading, first, second = csv.reader(io.StringIO(csv_of(frame), newline=""))
    assert heading == ["'" + formula, "n", "x", "t"]
    assert first == ["'" + formula, "-1", "-1.5", "-1"]
    assert second == ["plain", "2", "", "+2.5e3"]


@pytest.mark.parametrize("unseen", ["\u202e", "\u2066", "\u200b", "\u3164", "\U000e0041", "\x1b", "\ud800"])
def test_invisible_and_bidirectional_characters_are_shown_escaped(unseen: str) -> None:
    shown = show_unseen_in([{f"a{unseen}": [f"b{unseen}", 1, None]}])
    assert shown == [{f"a\\u{ord(unseen):04x}": [f"b\\u{ord(unseen):04x}", 1, None]}]
    assert unseen not in as_text(f"a{unseen}b")


def test_letters_of_all_scripts_and_emoji_stay_what_they_are() -> None:
    for name in ("Żółw 東京", "می\u200cخواهم", "\U0001f469\u200d\U0001f4bb", "क्\u200dष"):
        assert show_unseen_in(name) == name
