"""What others wrote is text in the tables and CSV of commands."""

from __future__ import annotations

import csv
import io

import pytest

from moiety_platform.cli.tables import show_csv, show_row, show_rows

HOSTILE = "[red]x[/red] [link=http://evil.example]y[/link] :smile: \x1b]8;;http://evil.example\x07z [/nothing]"


def test_a_name_is_neither_markup_nor_an_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"name": HOSTILE}], {"name": "name"}, as_json=False)
    show_row({"name": HOSTILE}, as_json=False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("[red]x[/red] [link=http://evil.example]y[/link] :smile: \\u001b]8;;") == 2


@pytest.mark.parametrize("formula", ["=1+1", "+1+1", "-1+cmd", "@SUM(A1)", "\t=1"])
def test_a_formula_is_text_in_a_csv(capsys: pytest.CaptureFixture[str], formula: str) -> None:
    show_csv([{"model": formula, "n": -1, "cost": "-1.5"}])
    _, row = csv.reader(io.StringIO(capsys.readouterr().out))
    assert row == ["'" + formula, "-1", "-1.5"]
