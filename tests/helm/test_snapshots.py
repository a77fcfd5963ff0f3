"""What the chart renders, line by line, so that a change of a template shows what comes of it in the same commit.

`python tests/helm/test_snapshots.py` writes the snapshots anew; look at the difference before it is committed. Boards
and rules are left out: scripts write them, and other tests hold them to these.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    import helm_python

CHART = Path(__file__).parents[2] / "helm" / "moiety"
FOLDER = Path(__file__).with_name("snapshots")
LEFT_OUT = ("monitoring/boards.yaml", "monitoring/prometheus-rule.yaml")
CONTEXT = 3  # lines, around what differs
TAKEN = ("kind", "production", "multi-node")


def snapshot(chart: helm_python.Chart, example: str) -> str:
    """All templates of one example, in the order of their names."""
    values = yaml.load((CHART / "examples" / f"{example}.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    made = chart.render(values, name="rel", namespace="prod")
    shown = {name: text.strip() for name, text in made.items() if not name.endswith(LEFT_OUT)}
    lines = (f"# {name.removeprefix('moiety/templates/')}\n{text}\n" for name, text in sorted(shown.items()) if text)
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines()) + "\n"


@pytest.mark.parametrize("example", TAKEN)
def test_an_example_renders_as_it_is_written_down(example: str, chart: helm_python.Chart) -> None:
    written = (FOLDER / f"{example}.txt").read_text(encoding="utf-8").splitlines()
    now = snapshot(chart, example).splitlines()
    differing = list(difflib.unified_diff(written, now, "written down", "rendered now", n=CONTEXT, lineterm=""))
    assert not differing, "\n".join([*differing, "if that is meant: python tests/helm/test_snapshots.py"])


def test_nothing_is_written_down_that_is_not_looked_at() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {*TAKEN}


def write_all() -> None:
    import helm_python  # not before the fork of workers: it starts threads

    FOLDER.mkdir(exist_ok=True)
    with helm_python.Chart.load(CHART) as chart:
        for example in TAKEN:
            (FOLDER / f"{example}.txt").write_text(snapshot(chart, example), encoding="utf-8")


if __name__ == "__main__":
    write_all()
