"""A release's objects in the order in which Helm installs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moiety_podrun.errors import NotPossible

CHART = Path(__file__).parents[1] / "moiety"
HOOK, WEIGHT = "helm.sh/hook", "helm.sh/hook-weight"

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Release:
    """Rendered objects: `before` and `after` are hooks by weight, `objects` all others."""

    before: Sequence[Object]
    objects: Sequence[Object]
    after: Sequence[Object]

    def of_kind(self, kind: str) -> list[Object]:
        """Return all objects of that kind."""
        return [one for one in (*self.before, *self.objects, *self.after) if one["kind"] == kind]


def render(values: Mapping[str, Any], name: str, namespace: str, *, upgrade: bool = False) -> Release:
    """Render the chart. Raises HelmError with the chart's message for invalid values, and NotPossible without Helm."""
    try:
        import helm_python  # noqa: PLC0415  part of what tests need, and not of what serves
    except ModuleNotFoundError as exc:
        raise NotPossible("Helm's own code is not here, which renders the chart: run `make .venv/.dev` first") from exc
    with helm_python.Chart.load(CHART) as chart:
        made = chart.render(dict(values), name=name, namespace=namespace, is_install=not upgrade, is_upgrade=upgrade)
    documents = [
        one for path, text in made.items() if not path.endswith(".txt") for one in yaml.load_all(text, yaml.CSafeLoader)
    ]
    found = [one for one in documents if one]
    event = "upgrade" if upgrade else "install"
    return Release(
        before=_hooks(found, f"pre-{event}"),
        objects=[one for one in found if HOOK not in _annotations(one)],
        after=_hooks(found, f"post-{event}"),
    )


def database_of_ones_own(namespace: str) -> Object:
    """Return a PostgreSQL outside any release.

    It is the one that the chart bundles, from another release of which nothing else is installed.
    """
    (found,) = (one for one in render({}, "outside", namespace).of_kind("StatefulSet") if _is_database(one))
    return found


def _is_database(one: Object) -> bool:
    return bool(one["metadata"]["labels"]["app.kubernetes.io/component"] == "database")


def _hooks(objects: Sequence[Object], event: str) -> list[Object]:
    chosen = [one for one in objects if event in _annotations(one).get(HOOK, "").split(",")]
    return sorted(chosen, key=lambda one: (int(_annotations(one).get(WEIGHT, 0)), one["kind"] == "Job"))


def _annotations(one: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = one["metadata"].get("annotations") or {}
    return found
