"""The chart, rendered by Helm's own code as a cluster's client would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    import helm_python

CHART = Path(__file__).parents[2] / "helm" / "moiety"
SETS = Path(__file__).with_name("value_sets.yaml")

Values = dict[str, Any]
Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


def value_sets() -> dict[str, Values]:
    """Return the sets of values of the tests and the examples."""
    found: dict[str, Values] = yaml.load(SETS.read_text(encoding="utf-8"), yaml.CSafeLoader)
    for example in sorted((CHART / "examples").glob("*.yaml")):
        found[f"example {example.stem}"] = yaml.load(example.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return found


def pod_templates(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of a workload's pods; none if the object is no workload."""
    spec = one.get("spec", {})
    if one["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][f"{role}Template"] for role in ("leader", "worker")]
    return [spec["template"]] if one["kind"] in ("Deployment", "StatefulSet", "Job") else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `objects` runs once for each set of values."""
    if "objects" in metafunc.fixturenames:
        sets = value_sets()
        metafunc.parametrize("objects", sets.values(), ids=sets, indirect=True)


@pytest.fixture(scope="session")
def chart() -> Iterator[helm_python.Chart]:
    import helm_python  # not before the fork of workers: it starts threads

    with helm_python.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: helm_python.Chart) -> Render:
    """Return all objects of a release with these values."""

    def objects_of(values: Values | None = None, **options: Any) -> Objects:
        made = chart.render(values or {}, name="rel", namespace="prod", **options)
        found = [
            one
            for name, text in made.items()
            if not name.endswith(".txt")
            for one in yaml.load_all(text, yaml.CSafeLoader)
        ]
        return [one for one in found if one]

    return objects_of


@pytest.fixture(scope="session")
def all_objects(render: Render) -> Objects:
    """Return every object that any set of values renders, once."""
    made = {json.dumps(one, sort_keys=True): one for values in value_sets().values() for one in render(values)}
    return list(made.values())


@pytest.fixture(scope="session")
def objects(request: pytest.FixtureRequest, render: Render) -> Objects:
    """All objects, for every set of values in turn."""
    return render(request.param)
