"""Who may talk to whom, by the policies that the chart renders and by Kubernetes' rules for them."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_podrun.policies import Peer, allows

PORTS = {
    "gateway": {"http": 8000},
    "engine-demo": {"engine": 5757},
    "dashboard": {"http": 8501},
    "traces": {"otlp": 4318},
    "database": {"postgres": 5432},
    "owner": {},
}
MEANT = {
    ("gateway", "engine-demo"),
    ("gateway", "traces"),
    ("gateway", "database"),
    ("traces", "database"),
    ("owner", "database"),
    ("dashboard", "gateway"),
}
ANYBODY = {"gateway", "dashboard"}  # as long as nobody has said who the clients are


@pytest.fixture(scope="session")
def peers(render: Any) -> dict[str, Peer]:
    """A pod of each part, with the labels that the chart gives it."""
    found = {}
    for number, one in enumerate(render(), start=1):
        labels = one.get("spec", {}).get("template", {}).get("metadata", {}).get("labels")
        if labels and (part := labels["app.kubernetes.io/component"]) in PORTS:
            found[part] = Peer(labels, f"10.77.0.{number}", PORTS[part])
    return found


@pytest.fixture(scope="session")
def policies(render: Any) -> list[dict[str, Any]]:
    return [one["spec"] for one in render() if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("source", PORTS)
@pytest.mark.parametrize("target", [part for part, ports in PORTS.items() if ports])
def test_what_is_not_meant_to_be_reached_is_not(
    source: str, target: str, peers: dict[str, Peer], policies: list[dict[str, Any]]
) -> None:
    (port,) = PORTS[target].values()
    assert allows(policies, peers[source], peers[target], port) == ((source, target) in MEANT)


@pytest.mark.parametrize("target", [part for part, ports in PORTS.items() if ports])
def test_a_stranger_in_the_cluster_reaches_only_what_is_for_clients(
    target: str, peers: dict[str, Peer], policies: list[dict[str, Any]]
) -> None:
    (port,) = PORTS[target].values()
    assert allows(policies, Peer({"app": "theirs"}, "10.9.9.9", {}), peers[target], port) == (target in ANYBODY)


def test_another_port_of_what_may_be_reached_stays_closed(
    peers: dict[str, Peer], policies: list[dict[str, Any]]
) -> None:
    assert not allows(policies, peers["gateway"], peers["engine-demo"], 22)
    assert not allows(policies, peers["dashboard"], peers["gateway"], 5432)
