"""Selection of parameter combinations in `make test`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import selection
from tests.selection import (
    beyond_sample,
    days_of_rotated,
    of_other_days,
    repeated_combinations,
    sample_steps,
    write_lists,
)

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
FUNCTION = "tests/kernels/test_against_reference.py::test_linear"


def collected(**environment: str) -> set[tuple[str, ...]]:
    """The parameters of the function's tests: arithmetic, n, k, rows, dtype."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MOIETY_TEST", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", FUNCTION]
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=True)
    return {tuple(found.split("-")) for found in re.findall(r"::test_linear\[(.*)\]", done.stdout)}


def test_each_value_of_each_parameter_is_kept_beside_each_of_those_named() -> None:
    some, all_ = collected(MOIETY_TEST_MEASURED="1"), collected(MOIETY_TEST_ALL="1")
    assert some < all_
    assert len(some) < len(all_) / 10
    for position in range(1, len(next(iter(all_)))):
        assert {(one[0], one[position]) for one in some} == {(one[0], one[position]) for one in all_}


def test_selection_keeps_every_value_of_a_product_and_every_row_of_a_table(pytester: pytest.Pytester) -> None:
    items = pytester.getitems("""
        import pytest

        @pytest.mark.parametrize("a", range(3))
        @pytest.mark.parametrize("b", range(4))
        def test_product(a, b): pass

        @pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 2)])
        def test_table(a, b): pass
    """)
    left_out = repeated_combinations(items)
    kept = [item for item in items if isinstance(item, pytest.Function) and item not in left_out]
    assert [item.callspec.params for item in kept if item.originalname == "test_product"] == [
        {"a": number % 3, "b": number} for number in range(4)
    ]
    assert sum(item.originalname == "test_table" for item in kept) == 4


def test_days_in_turn_contain_each_rotated_function_once(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = every_value")
    items = pytester.getitems("""
        import pytest

        def test_a(): pass
        def test_b(): pass
        def test_c(): pass
        def test_d(): pass
        def test_e(): pass
        def test_short(): pass

        @pytest.mark.every_value
        def test_always(): pass
    """)
    module = f"tests/{os.path.relpath(items[0].path, selection.TESTS)}"
    days = {
        f"{module}::test_{name}": day for name, day in (("a", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 4), ("always", 1))
    }
    assert of_other_days(items, {}, 7) == set(), "functions that are not listed run each day"
    for today, name in ((100, "test_a"), (101, "test_b"), (102, "test_c"), (103, "test_d"), (104, "test_e")):
        left_out = of_other_days(items, days, today)
        assert [item.name for item in items if item not in left_out] == [name, "test_short", "test_always"]


def test_consecutive_days_contain_each_test_of_a_sampled_and_rotated_function(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = one_in")
    items = pytester.getitems("""
        import pytest

        @pytest.mark.one_in(4)
        @pytest.mark.parametrize("a", range(8))
        def test_even(a): pass

        @pytest.mark.one_in(3)
        @pytest.mark.parametrize("a", range(8))
        def test_odd(a): pass
    """)
    module = f"tests/{os.path.relpath(items[0].path, selection.TESTS)}"
    days = {f"{module}::test_even": 0, f"{module}::test_odd": 2}
    never = set(items)
    for first in range(50, 70):
        never &= beyond_sample(items, {}, first, days) | of_other_days(items, days, first)
    assert not never


def test_a_sample_is_every_third_test_of_a_function_and_one_at_least(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = one_in")
    items = pytester.getitems("""
        import pytest

        @pytest.mark.one_in(3)
        @pytest.mark.parametrize("a", range(9))
        def test_many(a): pass

        @pytest.mark.one_in(3)
        @pytest.mark.parametrize("a", range(1))
        def test_single(a): pass

        @pytest.mark.parametrize("a", range(9))
        def test_all(a): pass
    """)
    left_out = beyond_sample(items, {})
    kept = [item for item in items if isinstance(item, pytest.Function) and item not in left_out]
    places = {
        name: [one.callspec.params["a"] for one in kept if one.originalname == name]
        for name in ("test_many", "test_single", "test_all")
    }
    first = places["test_many"][0]
    assert places == {"test_many": [first, first + 3, first + 6], "test_single": [0], "test_all": list(range(9))}


def test_a_function_that_takes_long_is_sampled_without_a_marker(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n one_in\n every_value")
    items = pytester.getitems("""
        import pytest

        @pytest.mark.parametrize("a", range(9))
        def test_long(a): pass

        @pytest.mark.one_in(3)
        @pytest.mark.parametrize("a", range(9))
        def test_both(a): pass

        @pytest.mark.one_in(3)
        @pytest.mark.every_value
        @pytest.mark.parametrize("a", range(9))
        def test_every(a): pass
    """)
    module = items[0].path
    steps = {f"tests/{os.path.relpath(module, ROOT / 'tests')}::{name}": 3 for name in ("test_long", "test_both")}
    kept = [item for item in items if item not in beyond_sample(items, steps)]
    assert len([item for item in kept if item.name.startswith("test_long")]) == 3
    assert len([item for item in kept if item.name.startswith("test_both")]) == 1
    assert len([item for item in kept if item.name.startswith("test_every")]) == 9


def test_consecutive_samples_contain_each_test_once(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = one_in")
    items = pytester.getitems("""
        import pytest

        @pytest.mark.one_in(4)
        @pytest.mark.parametrize("a", range(10))
        def test_many(a): pass
    """)
    samples = [set(items) - beyond_sample(items, {}, first) for first in range(20_000, 20_004)]
    assert sorted(item.name for sample in samples for item in sample) == sorted(item.name for item in items)


def test_lists_come_from_the_durations_of_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "LONG", tmp_path / "long.txt")
    monkeypatch.setattr(selection, "SAMPLED", tmp_path / "sampled.txt")
    monkeypatch.setattr(selection, "ROTATED", tmp_path / "rotated.txt")
    times = {"test_slow": 2.0, "test_short": 0.01, "test_medium": 0.2}
    cases = "".join(
        f'<testcase classname="tests.some.test_file" name="{name}[{number}]" time="{time}"/>'
        for name, time in times.items()
        for number in range(8)
    )
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    write_lists(tmp_path / "report.xml")
    assert (tmp_path / "long.txt").read_text() == "tests/some/test_file.py::test_slow\n"
    assert sample_steps() == {"tests/some/test_file.py::test_slow": 4, "tests/some/test_file.py::test_medium": 3}
    assert days_of_rotated() == {"tests/some/test_file.py::test_slow": 0}


def test_the_functions_of_a_file_run_on_one_day_and_each_day_takes_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONG", "SAMPLED", "ROTATED"):
        monkeypatch.setattr(selection, name, tmp_path / f"{name}.txt")
    files = {"a": 9, "b": 4, "c": 4, "d": 4, "e": 3, "f": 3}  # s of each of two functions
    cases = "".join(
        f'<testcase classname="tests.{file}" name="test_{number}" time="{time}"/>'
        for file, time in files.items()
        for number in range(2)
    )
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    write_lists(tmp_path / "report.xml")
    days = days_of_rotated()
    assert len(days) == 2 * len(files)
    assert all(days[f"tests/{file}.py::test_0"] == days[f"tests/{file}.py::test_1"] for file in files)
    taken = [sum(time for file, time in files.items() if days[f"tests/{file}.py::test_0"] == day) for day in range(5)]
    assert taken == [9, 4, 4, 4, 6]


def test_the_lists_name_functions_that_there_are() -> None:
    names = [name.split("::") for name in {*selection.LONG.read_text().split(), *sample_steps(), *days_of_rotated()}]
    sources = {path: (ROOT / path).read_text() for path, _ in names}
    missing = [(path, name) for path, name in names if f"def {name}(" not in sources[path] and name != "runTest"]
    assert missing == []
