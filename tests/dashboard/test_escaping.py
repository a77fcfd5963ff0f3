"""What others wrote is shown as text, and opens in a spreadsheet as text."""

from __future__ import annotations

import csv
import io

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from moiety_dashboard.escaping import as_text, csv_of

HOSTILE = (
    "![p](http://evil.example/key.png) [x](http://evil.example) **b** :red[r] :material/key: $x^2$ :smile: <b>h</b> "
    "# t | ~~s~~ www.evil.example a@evil.example http://evil.example `c` -> --"
)
FORMULAS = ["=1+1", "+1+1", "-1+cmd", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1"]


def rendered(text: str) -> list[str]:
    """The types of what the text becomes, below its paragraph, when it is rendered as Markdown."""
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
