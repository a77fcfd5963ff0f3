"""Text of other users stays text in the tables, lines, JSON and CSV of commands."""

from __future__ import annotations

import ast
import csv
import io
import json
from pathlib import Path

import pytest

import moiety_platform.cli
from moiety_platform.administration.catalog import RESOURCES
from moiety_platform.cli import usage
from moiety_platform.cli.main import main
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.tables import show_csv, show_json, show_row, show_rows
from moiety_platform.resources.paths import path_of

HOSTILE = "[red]x[/red] [link=http://evil.example]y[/link] :smile: \x1b]8;;http://evil.example\x07z [/nothing]"


def test_a_name_is_neither_markup_nor_an_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"name": HOSTILE}], {"name": "name"}, as_json=False)
    show_row({"name": HOSTILE}, as_json=False)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("[red]x[/red] [link=http://evil.example]y[/link] :smile: \\u001b]8;;") == 2


def test_every_field_that_a_narrow_terminal_omits_is_a_column_of_its_table() -> None:
    tables = [(one.columns, one.details) for one in RESOURCES if one.columns]
    tables += [(usage.TOTALS, usage.DETAILS), (usage.REQUESTS, usage.REQUEST_DETAILS)]
    assert len(tables) > 8
    assert [name for columns, details in tables for name in details if name not in columns] == []


@pytest.mark.parametrize("formula", ["=1+1", "+1+1", "-1+cmd", "@SUM(A1)", "\t=1"])
def test_a_formula_is_text_in_a_csv(capsys: pytest.CaptureFixture[str], formula: str) -> None:
    show_csv([{"model": formula, "n": -1, "cost": "-1.5"}])
    _, row = csv.reader(io.StringIO(capsys.readouterr().out))
    assert row == ["'" + formula, "-1", "-1.5"]


UNSEEN = ["\x1b[2J", "\x9b2J", "\r", "\x7f", "\u202e", "\u2066", "\u200b", "\u2028", "\u3164", "\U000e0041", "\ud800"]


@pytest.mark.parametrize("unseen", UNSEEN)
def test_nothing_that_a_terminal_does_not_draw_reaches_it(capsys: pytest.CaptureFixture[str], unseen: str) -> None:
    name = f"a{unseen}b"
    show_rows([{"name": name}], {"name": "name"}, as_json=False)
    show_row({"name": name}, as_json=False)
    show_csv([{"name": name}])
    print_line(f"the tenant {name} is there")
    show_json({"name": name})
    shown = capsys.readouterr().out
    assert unseen[0] not in shown
    assert shown.count(f"\\u{unseen.encode('utf-16-be', 'surrogatepass')[:2].hex()}") >= 4  # JSON has short ones
    assert json.loads(shown[shown.index("{") :]) == {"name": name}  # programs get it unchanged


def test_letters_of_all_scripts_and_emoji_stay_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    names = "Żółw 東京 می\u200cخواهم \U0001f469\u200d\U0001f4bb क्\u200dष"
    print_line(f"{names}\tof\nall")
    assert capsys.readouterr().out == f"{names}\tof\nall\n"


def test_a_refusal_is_shown_without_what_it_does_to_a_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["tenant", "list", "--data-dir", str(tmp_path / "\x1b]0;owned\x07")])
    assert "\\u001b]0;owned\\u0007" in capsys.readouterr().err


def test_commands_write_lines_in_one_way_only() -> None:
    folder = Path(moiety_platform.cli.__file__).parent
    direct = [
        f"{path.relative_to(folder)}:{node.lineno}"
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.echo", "click.echo", "print")
    ]
    assert [one.partition(":")[0] for one in direct] == ["printing.py"]


def test_a_path_of_names_stays_one_path() -> None:
    assert path_of("classes", "../tenants?a=b#c/d") == "/classes/..%2Ftenants%3Fa%3Db%23c%2Fd"
