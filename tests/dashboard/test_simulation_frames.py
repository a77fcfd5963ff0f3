"""Simulations in words."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_dashboard.frames import simulations

SETTINGS: dict[str, Any] = {
    "minutes": 60, "times": 2.0, "replicas_now": 1, "replicas": 3, "classes": {}, "policy": "moiety",
}  # fmt: skip


@pytest.mark.parametrize("source", simulations.GENERATED)
def test_a_simulation_of_generated_arrivals_is_named_as_in_its_form(source: str) -> None:
    shown = simulations.in_words({**SETTINGS, "generate": source})
    assert shown == f"{simulations.GENERATED[source]}, × 2, 1 → 3 replicas, policy moiety"


def test_a_simulation_of_other_arrivals_is_named_by_their_specification() -> None:
    assert simulations.in_words({**SETTINGS, "generate": "uniform:rate=1"}).startswith("uniform:rate=1, × 2")
    assert simulations.in_words({**SETTINGS, "generate": None}).startswith("last 60 min, × 2")
