"""The pods' network: one namespace per pod, one router between them, and only connections that policies allow.

The router is the namespace of this process. It must be separate from the machine's, as must its mounts: rules,
addresses and names are changed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from itertools import count, permutations
from pathlib import Path

from moiety_podrun.errors import NotPossible
from moiety_podrun.policies import Peer, Policy, allows

ROUTER = "10.78.0.1"  # address of the node itself, the source of probes
PODS = "10.77.0.0/16"
GATEWAY = "169.254.1.1"  # of every pod, at the router's end of its veth pair
NO_PORT = 1  # no pod's port: a peer that may reach it may reach all ports
ALLOWED, REFUSED = "100", "200"  # priorities of rules


class Network:
    """Owner of the namespaces, and of the rules for connections among `peers`."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = policies
        self._numbers = count(2)
        self._services = count(2)
        self._peers: dict[str, Peer] = {}
        self._rules: set[tuple[str, ...]] = set()
        Path("/run/netns").mkdir(exist_ok=True)
        _run(
            "mount", "-t", "tmpfs", "none", "/run/netns"
        )  # private mount, so that names belong to this run and end with it
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "address", "add", f"{ROUTER}/32", "dev", "lo")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        _run("ip", "rule", "add", "from", PODS, "to", PODS, "priority", REFUSED, "prohibit")

    def add(self, name: str, labels: Mapping[str, str], ports: Mapping[str, int]) -> Peer:
        """Give a pod a namespace of that name and an address. Policies decide which connections reach it."""
        number = next(self._numbers)
        address = f"10.77.{number // 250}.{number % 250 + 1}"
        wire = f"pod{number}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "address", "add", f"{GATEWAY}/32", "dev", wire)
        _run("ip", "link", "set", wire, "up")
        _run("ip", "route", "add", f"{address}/32", "dev", wire)
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address}/32", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", GATEWAY, "dev", "eth0", "scope", "link"),
            ("route", "add", "default", "via", GATEWAY),
        ):
            _run("ip", "-n", name, *words)
        self._peers[name] = Peer(labels, address, ports)
        self._apply()
        return self._peers[name]

    def remove(self, name: str) -> None:
        """Delete the pod's namespace."""
        del self._peers[name]
        self._apply()
        _run("ip", "netns", "delete", name)

    def new_service_address(self) -> str:
        """Return a new address of the router, on which a Service can be served."""
        address = f"10.78.1.{next(self._services)}"
        _run("ip", "address", "add", f"{address}/32", "dev", "lo")
        return address

    def may_connect(self, source: str, target: Peer, port: int) -> bool:
        """Return whether policies allow a connection from the address `source`; policies do not apply to non-pods."""
        found = next((peer for peer in self._peers.values() if peer.address == source), None)
        return found is None or allows(self._policies, found, target, port)

    def _apply(self) -> None:
        wanted: set[tuple[str, ...]] = set()
        for source, target in permutations(self._peers.values(), 2):
            if allows(self._policies, source, target, NO_PORT):
                wanted |= {
                    ("from", source.address, "to", target.address),
                    ("from", target.address, "to", source.address),
                }
            for port in target.ports.values():
                if allows(self._policies, source, target, port):
                    there = ("from", source.address, "to", target.address, "ipproto", "tcp", "dport", str(port))
                    back = ("from", target.address, "to", source.address, "ipproto", "tcp", "sport", str(port))
                    wanted |= {there, back}
        for rule in wanted - self._rules:
            _run("ip", "rule", "add", *rule, "priority", ALLOWED, "lookup", "main")
        for rule in self._rules - wanted:
            _run("ip", "rule", "delete", *rule, "priority", ALLOWED)
        self._rules = wanted


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossible(f"{' '.join(words)}: {done.stderr.strip()}; this needs Linux, its root user and iproute2")
