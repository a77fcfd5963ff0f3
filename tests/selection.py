"""Tests that `make test` and `make test-fast` run, of all that there are.

What a function took is in three lists, which a run with every function writes anew:

    MOIETY_TEST_MEASURED=1 make tests ARGS=--junit-xml=report.xml
    .venv/bin/python -m tests.selection report.xml
"""

from __future__ import annotations

import math
import os
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from zlib import crc32

import pytest

TESTS = Path(__file__).parent
WITH_PROCESSES = frozenset({"system", "dashboard", "helm", "fuzz"})  # folders whose tests start servers or a browser
LONG = TESTS / "long_tests.txt"  # functions that `make test-fast` leaves out
SHORT_S = 0.03  # mean of the other functions
LONG_S = 0.4  # a test of them takes more than this, while others run on the same processors
SAMPLED = TESTS / "sampled_tests.txt"  # functions of which `make test` runs each n-th test, with n
SAMPLED_S = 0.6  # as many tests as take this long altogether are run of each, and a quarter at least
ROTATED = TESTS / "rotated_tests.txt"  # functions that `make test` runs each fifth day, with which of the five
ROTATED_S = 1.0  # the mean of their tests takes more than this
DAYS = 5


def repeated_combinations(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that can be left out: of each function, those kept have every value of each parameter at least
    once, beside every value of the parameters that the marker `combinations` names (`by`)."""
    return {item for function in _by_function(items) for item in _not_needed(function)}


def sample_steps() -> dict[str, int]:
    """Return for each function that is sampled since it takes long, by its node id, of how many tests one is run."""
    lines = (line.rsplit(" ", 1) for line in SAMPLED.read_text(encoding="utf-8").splitlines())
    return {name: int(step) for name, step in lines}


def days_of_rotated() -> dict[str, int]:
    """Return for each function that runs each fifth day, by its node id, the remainder of that day's number."""
    lines = (line.rsplit(" ", 1) for line in ROTATED.read_text(encoding="utf-8").splitlines())
    return {name: int(day) for name, day in lines}


def beyond_sample(
    items: list[pytest.Item], steps: Mapping[str, int], first: int = 0, days: Mapping[str, int] = {}
) -> set[pytest.Item]:
    """Return the tests that can be left out of functions marked `one_in(n)`, or that `steps` has: all but each n-th.

    Functions begin to count at different ones, so that each value is in some function's sample. `first` shifts all of
    them: n consecutive numbers choose every test of a function once; 5 · n of the functions of `days`, which run each
    fifth day. Functions marked `every_value` are not sampled.
    """
    beyond: set[pytest.Item] = set()
    for function in _by_function(items):
        marker = function[0].get_closest_marker("one_in")
        step = (marker.args[0] if marker else 1) * steps.get(_name(function[0]), 1)
        if step > 1 and function[0].get_closest_marker("every_value") is None:
            shift = first // DAYS if _name(function[0]) in days else first
            begin = crc32(function[0].originalname.encode()) + shift
            sample = function[begin % min(step, len(function)) :: step]
            beyond.update(set(function).difference(sample))
    return beyond


def of_other_days(items: list[pytest.Item], days: Mapping[str, int], today: int) -> set[pytest.Item]:
    """Return the tests that can be left out today: those of functions that `days` gives another one of five days.
    `today` is a number of days. Functions marked `every_value` run each day."""
    return {
        item
        for item in items
        if days.get(_name(item), today % DAYS) != today % DAYS and item.get_closest_marker("every_value") is None
    }


def _by_function(items: list[pytest.Item]) -> Iterable[list[pytest.Function]]:
    """Return the tests with parameters, each function's in one list."""
    functions: dict[tuple[Path, str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            where = item.parent.nodeid if item.parent else ""
            functions.setdefault((item.path, where, item.originalname), []).append(item)
    return functions.values()


def further_mutants(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that a changed kernel is noticed, all but the first of each file."""
    seen: set[Path] = set()
    further: set[pytest.Item] = set()
    for item in items:
        if isinstance(item, pytest.Function) and "a_mutant" in item.originalname:
            if item.path in seen:
                further.add(item)
            seen.add(item.path)
    return further


def _not_needed(function: list[pytest.Function]) -> Iterator[pytest.Function]:
    """Yield what a greedy cover leaves over: the next test kept is always the one with the most values not yet seen.
    Parameters that one `parametrize` lists together are rows of a table, and count as one."""
    marker = function[0].get_closest_marker("combinations")
    by = marker.kwargs.get("by", ()) if marker else ()
    names = [one.args[0] for one in function[0].iter_markers("parametrize")]
    rows = [tuple(part.strip() for part in one.split(",")) if isinstance(one, str) else tuple(one) for one in names]
    alone = [(name,) for name in function[0].callspec.params if not any(name in row for row in rows)]
    values = {}
    for item in function:
        params = {name: repr(value) for name, value in item.callspec.params.items()}
        beside = tuple(params[name] for name in by)
        values[item] = {(row, tuple(params[name] for name in row), beside) for row in (*rows, *alone)}
    missing = set().union(*values.values())
    while missing:
        best = max(values, key=lambda item: len(values[item] & missing))
        missing -= values.pop(best)
    yield from values


def fast_tests(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that are short and start no processes, of each function the first."""
    long = frozenset(LONG.read_text(encoding="utf-8").split())
    fast: dict[str, pytest.Item] = {}
    for item in items:
        with_processes = item.path.relative_to(TESTS).parts[0] in WITH_PROCESSES
        if not (with_processes or item.get_closest_marker("slow") or _name(item) in long):
            fast.setdefault(_name(item), item)
    return set(fast.values())


def expected_durations_s(items: list[pytest.Item]) -> list[float]:
    """Return roughly how long each test takes, in seconds, by the lists in which its function is."""
    rotated, long = days_of_rotated(), frozenset(LONG.read_text(encoding="utf-8").split())
    names = map(_name, items)
    return [2 * ROTATED_S if name in rotated else LONG_S if name in long else SHORT_S for name in names]


def _name(item: pytest.Item) -> str:
    """Return the node id of a test's function."""
    return f"tests/{os.path.relpath(item.path, TESTS)}::{getattr(item, 'originalname', item.name)}"


def write_lists(report: Path) -> None:
    """Write the lists from a JUnit report of a run with MOIETY_TEST_MEASURED=1."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).getroot().iter("testcase"):
        path = _file_of(case.attrib["classname"])
        function = case.attrib["name"].split("[", 1)[0]
        seconds[f"{path}::{function}"].append(float(case.attrib["time"]))
    means = {name: sum(times) / len(times) for name, times in sorted(seconds.items())}
    steps = {name: _step(len(seconds[name]), mean) for name, mean in means.items()}
    LONG.write_text("".join(f"{name}\n" for name, mean in means.items() if mean > LONG_S), encoding="utf-8")
    SAMPLED.write_text("".join(f"{name} {step}\n" for name, step in steps.items() if step > 1), encoding="utf-8")
    taken = {name: sum(seconds[name]) / steps[name] for name, mean in means.items() if mean > ROTATED_S}
    ROTATED.write_text("".join(f"{name} {day}\n" for name, day in _days(taken).items()), encoding="utf-8")


def _file_of(classname: str) -> str:
    """Return the file of a test by the name that a JUnit report gives its module, or its class."""
    modules, last = classname.rsplit(".", 1)
    return (modules if last.startswith("Test") else classname).replace(".", "/") + ".py"


def _days(taken_s: Mapping[str, float]) -> dict[str, int]:
    """Return the day of each function: the same for those of one file, which often share what they start, and such that
    each day takes about as long. `taken_s`: what the function's tests of a run take."""
    files: defaultdict[str, float] = defaultdict(float)
    for name, taken in taken_s.items():
        files[name.split("::")[0]] += taken
    loads, days = [0.0] * DAYS, {}
    for file in sorted(files, key=lambda file: (-files[file], file)):
        days[file] = loads.index(min(loads))
        loads[days[file]] += files[file]
    return {name: days[name.split("::")[0]] for name in taken_s}


def _step(count: int, mean_s: float) -> int:
    """Return of how many tests one is run, where `count` tests take `mean_s` each."""
    wanted = max(1, math.ceil(count / 4), int(SAMPLED_S / max(mean_s, 1e-6)))
    return math.ceil(count / min(count, wanted))


if __name__ == "__main__":
    write_lists(Path(sys.argv[1]))
