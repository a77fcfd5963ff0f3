"""A release of the chart's first version upgrades with its old values, and no object must be recreated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import Render

FIRST = yaml.load(Path(__file__).with_name("first_release.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
LASTING = (
    "selector",
    "serviceName",
    "podManagementPolicy",
    "volumeClaimTemplates",
)  # which Kubernetes does not let anyone change


@pytest.fixture(scope="module")
def upgraded(render: Render) -> list[dict[str, Any]]:
    return render(FIRST["values"], is_install=False, is_upgrade=True)


def lasting(one: dict[str, Any]) -> dict[str, Any]:
    kept = LASTING if one["kind"] == "StatefulSet" else LASTING[:1]
    defaults = {"podManagementPolicy": "OrderedReady", "volumeClaimTemplates": []}
    return {name: one["spec"].get(name, defaults.get(name)) for name in kept}


def test_immutable_fields_equal_those_of_the_first_release(upgraded: list[dict[str, Any]]) -> None:
    found = {
        f"{one['kind']}/{one['metadata']['name']}": lasting(one)
        for one in upgraded
        if one["kind"] in ("Deployment", "StatefulSet")
    }
    assert {name: found.get(name) for name in FIRST["lasting"]} == FIRST["lasting"]


def test_values_of_the_first_release_ask_for_no_entry_that_its_secret_lacks_and_nobody_adds(
    upgraded: list[dict[str, Any]],
) -> None:
    made = {"pepper", "curve-engine-public", "curve-engine-secret", "curve-gateway-public", "curve-gateway-secret"}
    made |= {"traces-token", "database-password", "database-url"}
    asked = [one for one in _references(upgraded) if one["name"] == "rel-moiety-secrets"]
    assert {"pepper", "database-url"} <= {one["key"] for one in asked if not one.get("optional")} <= made


def _references(value: Any) -> list[dict[str, Any]]:
    """Return every secretKeyRef within a value."""
    if isinstance(value, list):
        return [found for one in value for found in _references(one)]
    if not isinstance(value, dict):
        return []
    here = [value["secretKeyRef"]] if "secretKeyRef" in value else []
    return here + [found for one in value.values() for found in _references(one)]
