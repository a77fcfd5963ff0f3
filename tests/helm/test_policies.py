"""Rules of a cluster's security review hold for all pods of the chart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .conftest import pod_templates

SECRET = re.compile(r"(?i)password|token|secret|pepper|api_?key")
MAY_ASK_THE_CLUSTER = {
    "rel-moiety-declared",
    "rel-moiety-secrets",
    "rel-moiety-owner",
    "rel-moiety-controller",
    "rel-moiety-endpoint-picker",
    "tokens-secrets",
    "tokens-owner",
}


def test_no_container_can_do_more_than_it_needs(objects: list[dict[str, Any]]) -> None:
    for name, pod in _pods(objects):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        for container in _containers(pod):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}


def test_every_container_says_what_it_needs_and_what_it_may_take(objects: list[dict[str, Any]]) -> None:
    for name, pod in _pods(objects):
        for container in _containers(pod):
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), name
            assert "memory" in resources["limits"], "one that leaks must not take the node with it"


def test_no_image_is_whatever_is_newest(objects: list[dict[str, Any]]) -> None:
    for _, pod in _pods(objects):
        for container in _containers(pod):
            tag = container["image"].rpartition("/")[2]
            assert ":" in tag, container["image"]
            assert not tag.endswith(":latest")


def test_nothing_of_the_node_is_mounted(objects: list[dict[str, Any]]) -> None:
    for name, pod in _pods(objects):
        assert [volume for volume in pod.get("volumes", ()) if "hostPath" in volume] == [], name


def test_only_those_that_make_secrets_have_a_token_of_the_cluster(objects: list[dict[str, Any]]) -> None:
    tokens = {name for name, pod in _pods(objects) if pod["automountServiceAccountToken"]}
    assert tokens <= MAY_ASK_THE_CLUSTER | _may_scale(objects)
    for one in objects:
        if one["kind"] == "ServiceAccount":
            assert one["automountServiceAccountToken"] is False
        if one["kind"] == "Role":
            if one["metadata"]["name"].endswith("-controller"):
                continue  # custom resources name their Secrets
            if one["metadata"]["name"].endswith("-endpoint-picker"):
                assert [(rule["resources"], rule["verbs"]) for rule in one["rules"]] == [
                    (["pods"], ["get", "list", "watch"])
                ]
                continue
            named = [rule for rule in one["rules"] if rule["verbs"] != ["create"]]
            assert all(rule["resourceNames"] for rule in named), "no other Secret of the namespace can be read"


def _may_scale(objects: list[dict[str, Any]]) -> set[str]:
    """Return the name of the gateways if they scale pools; they may do nothing else in the cluster."""
    roles = [one for one in objects if one["kind"] == "Role" and one["metadata"]["name"].endswith("-scaler")]
    for role in roles:
        assert [(rule["resources"], rule["verbs"]) for rule in role["rules"]] == [
            (["statefulsets/scale"], ["get", "patch"])
        ]
    return {"rel-moiety-gateway"} if roles else set()


def test_no_secret_stands_in_plain_text(objects: list[dict[str, Any]]) -> None:
    assert [one for one in objects if one["kind"] == "Secret"] == []
    for name, pod in _pods(objects):
        for container in _containers(pod):
            for variable in container.get("env", ()):
                if SECRET.search(variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], f"{name}: {variable['name']}"


def test_pods_have_enough_time_to_stop(objects: list[dict[str, Any]]) -> None:
    for name, pod in _pods(objects):
        for container in pod["containers"]:
            if container.get("args", [""])[0] == "gateway":
                waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
                assert pod["terminationGracePeriodSeconds"] > waits + 10, name
            for argument in container.get("args", ()):
                if argument.startswith("--drain-s="):
                    assert pod["terminationGracePeriodSeconds"] > int(argument.partition("=")[2])


def test_every_pod_is_refused_all_traffic_but_what_a_policy_allows(objects: list[dict[str, Any]]) -> None:
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    if not policies:
        return  # they are off
    labels = [template["metadata"]["labels"] for one in objects for template in pod_templates(one)]
    for one in labels:
        chosen = [spec for spec in policies if spec["podSelector"]["matchLabels"].items() <= one.items()]
        assert any("ingress" not in spec and "egress" not in spec for spec in chosen), one
        assert len(chosen) >= 3, "nothing, names, and what it needs"


def test_only_gateways_reach_engines(objects: list[dict[str, Any]]) -> None:
    for one in objects:
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-engine"):
            rules = {port["port"]: rule["from"] for rule in one["spec"]["ingress"] for port in rule["ports"]}
            assert rules.keys() == {"engine", "metrics"}
            (peer,) = rules["engine"]
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"


def _pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((one["metadata"]["name"], template["spec"]) for one in objects for template in pod_templates(one))


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["containers"], *pod.get("initContainers", ())]
