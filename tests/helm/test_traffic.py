"""The traffic that the chart's network policies allow, by Kubernetes' rules."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_podrun.policies import Peer, allows

PORTS = {
    "gateway": {"http": 8000},  # and OPERATIONS
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
OPERATIONS = {"operations": 8002}
ANYBODY = {"gateway", "dashboard"}  # as long as nobody has said who the clients are


@pytest.fixture(scope="session")
def peers(render: Any) -> dict[str, Peer]:
    """Return a pod of each part, with the chart's labels."""
    found = {}
    for number, one in enumerate(render(), start=1):
        labels = one.get("spec", {}).get("template", {}).get("metadata", {}).get("labels")
        if labels and (part := labels["app.kubernetes.io/component"]) in PORTS:
            found[part] = Peer(labels, f"10.77.0.{number}", PORTS[part] | (OPERATIONS if part == "gateway" else {}))
    return found


@pytest.fixture(scope="session")
def policies(render: Any) -> list[dict[str, Any]]:
    return [one["spec"] for one in render() if one["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("source", PORTS)
@pytest.mark.parametrize("target", [part for part, ports in PORTS.items() if ports])
def test_internal_ports_are_not_reachable(
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


@pytest.mark.parametrize(
    ("values", "port"),
    [
        ({"traces": {"otlpEndpoint": "http://collector.observability:4318"}}, 4318),
        ({"traces": {"otlpEndpoint": "http://collector:4317", "otlpProtocol": "grpc"}}, 4317),
        ({"traces": {"otlpEndpoint": "http://collector/v1"}}, 80),
        ({"gateway": {"settings": {"otlp_metrics_endpoint": "http://[fd00::7]:9090/v1/metrics"}}}, 9090),
    ],
)
def test_a_collector_that_values_name_is_reached_on_its_port(render: Any, values: dict[str, Any], port: int) -> None:
    collector = Peer({"app": "collector"}, "10.9.9.9", {})

    def reached(values: dict[str, Any]) -> bool:
        objects = render(values)
        gateway = next(
            one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "rel-moiety-gateway"
        )
        source = Peer(gateway["spec"]["template"]["metadata"]["labels"], "10.77.0.1", {})
        return allows([one["spec"] for one in objects if one["kind"] == "NetworkPolicy"], source, collector, port)

    assert reached(values)
    assert not reached({})


def test_another_port_of_what_may_be_reached_stays_closed(
    peers: dict[str, Peer], policies: list[dict[str, Any]]
) -> None:
    assert not allows(policies, peers["gateway"], peers["engine-demo"], 22)
    assert not allows(policies, peers["dashboard"], peers["gateway"], 5432)


@pytest.mark.parametrize("clients", [[], [{"podSelector": {}}]])
def test_only_scrapers_reach_the_operations_port(render: Any, peers: dict[str, Peer], clients: list[Any]) -> None:
    scrapers = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    objects = render({"networkPolicies": {"clients": clients, "scrapers": scrapers}})
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    (port,) = OPERATIONS.values()
    assert allows(policies, Peer({"app": "prometheus"}, "10.9.9.9", {}), peers["gateway"], port)
    others = [*peers.values(), Peer({"app": "theirs"}, "10.9.9.8", {})]
    assert not any(allows(policies, one, peers["gateway"], port) for one in others)


def test_the_operations_port_is_in_a_service_inside_the_cluster_that_nothing_leads_to(render: Any) -> None:
    objects = render(
        {
            "gateway": {"service": {"type": "LoadBalancer"}, "operationsPort": 9100},
            "ingress": {"enabled": True, "host": "llm.example.com", "paths": ["/"]},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "paths": ["/"]},
            "monitoring": {"serviceMonitor": {"enabled": True}},
        }
    )
    ports = {
        one["metadata"]["name"]: (one["spec"]["type"], [port["port"] for port in one["spec"]["ports"]])
        for one in objects
        if one["kind"] == "Service" and one["spec"]["selector"].get("app.kubernetes.io/component") == "gateway"
    }
    assert ports == {"rel-moiety": ("LoadBalancer", [80]), "rel-moiety-operations": ("ClusterIP", [9100])}
    led_to = [one for one in objects if one["kind"] in ("Ingress", "HTTPRoute")]
    assert len(led_to) == 2
    assert "operations" not in str(led_to)
    (monitor,) = [
        one for one in objects if one["kind"] == "ServiceMonitor" and one["metadata"]["name"] == "rel-moiety-gateway"
    ]
    assert [one["port"] for one in monitor["spec"]["endpoints"]] == ["operations"]
