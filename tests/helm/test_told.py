"""The chart's README states what was executed, computed or validated of each rendered object."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .conftest import CHART, Render
from .running import EXAMPLE
from .test_groups import VALUES as OF_GROUPS
from .test_own_database import VALUES as OF_OWN_DATABASE
from .test_pods import VALUES as OF_PODS

EXECUTED = (OF_PODS, OF_OWN_DATABASE, OF_GROUPS)

Objects = list[dict[str, Any]]


def part(one: dict[str, Any]) -> tuple[str, str]:
    """An object's kind, and the part of the release that it is of; all pools of engines are one."""
    component = one["metadata"]["labels"]["app.kubernetes.io/component"]
    return one["kind"], "engine" if component.startswith("engine-") else component


def told() -> dict[tuple[str, str], str]:
    """Return the table: kind and part → what was done with it."""
    page = (CHART / "README.head.md").read_text(encoding="utf-8").partition("## Test coverage")[2]
    rows = re.findall(r"^\| (\w+) \| ([\w, -]+) \| (\w+) \|", page, re.MULTILINE)
    return {(kind, one): was for kind, parts, was in rows for one in parts.split(", ") if was != "status"}


def test_the_readme_says_of_every_object_what_was_done_with_it(all_objects: Objects) -> None:
    assert set(told()) == {part(one) for one in all_objects}
    assert set(told().values()) == {"executed", "computed", "validated"}


def test_fields_listed_as_executed_are_passed_to_the_runner(render: Render) -> None:
    example = yaml.load(EXAMPLE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    given = {part(one) for values in EXECUTED for one in render({**example, **yaml.load(values, yaml.CSafeLoader)})}
    assert {one for one, was in told().items() if was == "executed"} <= given
