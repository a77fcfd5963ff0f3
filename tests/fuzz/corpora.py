"""The corpus of each target: one input a line, as a JSON string of Latin-1 characters, so that bytes survive and text
is readable."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz import of_engine, of_files, of_gateway

FIGURES = "figures.json"  # of a run
FOLDER = Path(__file__).parent / "corpora"
TARGETS = {target.name: target for target in (*of_engine.TARGETS, *of_files.TARGETS, *of_gateway.TARGETS)}


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def kept(name: str) -> list[bytes]:
    lines = path_of(name).read_text(encoding="ascii").splitlines()
    return [json.loads(line).encode("latin-1") for line in lines]


def keep(name: str, inputs: Iterable[bytes]) -> None:
    """Write the corpus anew, each input once and the short ones first."""
    ordered = sorted(set(inputs), key=lambda one: (len(one), one))
    path_of(name).write_text("".join(json.dumps(one.decode("latin-1")) + "\n" for one in ordered), encoding="ascii")
