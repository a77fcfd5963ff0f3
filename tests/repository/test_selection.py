"""Selection of parameter combinations in `make test`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import selection
from tests.selection import beyond_sample, other_half, repeated_combinations, sample_steps, write_lists

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


def test_consecutive_samples_contain_each_function_of_an_alternating_file_once(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeini("[pytest]\nmarkers = every_value")
    items = pytester.getitems("""
        import pytest

        def test_a(): pass
        def test_b(): pass
        def test_c(): pass

        @pytest.mark.every_value
        def test_always(): pass
    """)
    assert other_half(items, 7) == set(), "files that are not listed are whole"
    monkeypatch.setattr(selection, "ALTERNATING", frozenset({os.path.relpath(items[0].path, selection.TESTS)}))
    even, odd = ({item.name for item in other_half(items, first)} for first in (100, 101))
    assert even | odd == {"test_a", "test_b", "test_c"}
    assert not even & odd


def test_consecutive_samples_contain_each_test_of_an_alternating_file(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(selection, "ALTERNATING", frozenset({os.path.relpath(items[0].path, selection.TESTS)}))
    never = set(items)
    for first in range(50, 58):
        never &= beyond_sample(items, {}, first) | other_half(items, first)
    assert not never


def test_alternating_files_exist() -> None:
    assert [name for name in selection.ALTERNATING if not (selection.TESTS / name).is_file()] == []


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


def test_the_lists_name_functions_that_there_are() -> None:
    names = [name.split("::") for name in {*selection.LONG.read_text().split(), *sample_steps()}]
    sources = {path: (ROOT / path).read_text() for path, _ in names}
    missing = [(path, name) for path, name in names if f"def {name}(" not in sources[path] and name != "runTest"]
    assert missing == []
