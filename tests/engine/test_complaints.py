"""The name of a checkpoint or a file cannot control the terminal that shows an error."""

from __future__ import annotations

import pytest

from moiety_engine.command_errors import print_error


def test_an_error_is_neither_markup_nor_an_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(
        "moiety plan", ValueError("no [link=http://evil.example]x[/link] [/red] \x1b[2J\x9b2J \u202e:smile:\nMore.")
    )
    shown = capsys.readouterr().err
    assert "no [link=http://evil.example]x[/link] [/red] \\u001b[2J\\u009b2J \\u202e:smile:\nMore." in shown
    assert shown.startswith("moiety plan: ")
