"""What the benchmark of the first start makes of its rounds, and what it starts them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def first_start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import first_start

    return first_start


def test_starts_are_judged_by_the_median_of_their_time(first_start: Any) -> None:
    def one(seconds: float, cpu_s: float) -> dict[str, float]:
        return {"seconds": seconds, "cpu_s": cpu_s}

    rounds = [
        {"not_compiled": one(20 + number, 30), "precompiled": one(7.9, 9), "second": one(8 + number, 7)}
        for number in range(3)
    ]
    found = first_start.medians(rounds)
    assert found["not_compiled"] == {"seconds": 21, "cpu_s": 30, "is_within_8_s": False}
    assert found["precompiled"]["is_within_8_s"]
    assert not found["second"]["is_within_8_s"]


def test_new_kernels_are_a_copy_that_nothing_has_compiled(first_start: Any, tmp_path: Path) -> None:
    first, *_ = first_start.with_new_kernels(tmp_path / "new")["PYTHONPATH"].split(":")
    assert first == str(tmp_path / "new")
    assert (tmp_path / "new" / "moiety_kernels" / "cpu" / "compiling.py").exists()
    assert not list((tmp_path / "new").rglob("__pycache__"))
