"""NetworkPolicy evaluation: which pods may connect to which. Pure.

A pod that no policy selects for a direction may connect freely in it; for a selected pod, any of the policies may allow
a connection (https://kubernetes.io/docs/concepts/services-networking/network-policies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

Labels = Mapping[str, str]
Policy = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a connection: a pod of the release's namespace, by its labels, address and the names of its ports."""

    labels: Labels
    address: str
    ports: Mapping[str, int]


def allows(policies: Sequence[Policy], source: Peer, target: Peer, port: int) -> bool:
    """Return whether `source` reaches the TCP `port` of `target`."""
    return _direction(policies, "Egress", source, target, target, port) and _direction(
        policies, "Ingress", target, source, target, port
    )


def _direction(policies: Sequence[Policy], kind: str, of: Peer, other: Peer, target: Peer, port: int) -> bool:
    rules, peers = ("egress", "to") if kind == "Egress" else ("ingress", "from")
    chosen = [one for one in policies if kind in one["policyTypes"] and _selects(one["podSelector"], of.labels)]
    return not chosen or any(
        _port_fits(rule.get("ports"), target, port) and _peer_fits(rule.get(peers), other)
        for policy in chosen
        for rule in policy.get(rules) or ()
    )


def _port_fits(ports: Sequence[Mapping[str, Any]] | None, target: Peer, port: int) -> bool:
    if not ports:
        return True
    numbers = [target.ports.get(one["port"]) if isinstance(one["port"], str) else one["port"] for one in ports]
    return any(
        number == port for number, one in zip(numbers, ports, strict=True) if one.get("protocol", "TCP") == "TCP"
    )


def _peer_fits(peers: Sequence[Mapping[str, Any]] | None, other: Peer) -> bool:
    return not peers or any(_one_fits(peer, other) for peer in peers)


def _one_fits(peer: Mapping[str, Any], other: Peer) -> bool:
    if "ipBlock" in peer:
        return ip_address(other.address) in ip_network(peer["ipBlock"]["cidr"])
    if peer.get("namespaceSelector"):
        return False  # all pods are in one namespace without labels of the operator
    return _selects(peer.get("podSelector") or {}, other.labels)


def _selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    wanted = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(
        _expression_holds(one, labels) for one in selector.get("matchExpressions") or ()
    )


def _expression_holds(one: Mapping[str, Any], labels: Labels) -> bool:
    value, operator = labels.get(one["key"]), one["operator"]
    if operator in ("Exists", "DoesNotExist"):
        return bool((value is not None) == (operator == "Exists"))
    return bool((value in one["values"]) == (operator == "In"))
