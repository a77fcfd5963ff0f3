"""Members of the pool with their readiness and load. Knows no proxy and sends nothing."""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import structlog

from moiety_platform.endpoint_picker.errors import BadEndpoint
from moiety_platform.endpoint_picker.picking import LOAD_FACTOR, Candidate, PickOutcome, pick_endpoints

MAX_TIMEOUTS = 3  # probes in a row without an answer after which an endpoint is not ready

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EndpointAddress:
    """Address for requests, `ip:port`, and the URL of the endpoint's readiness."""

    address: str
    ready_url: str

    @classmethod
    def of_url(cls, url: str, operations_port: int | None = None) -> EndpointAddress:
        """Return the endpoint of `http://IP:PORT`. Raises BadEndpoint."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise BadEndpoint(f"{url} is not a URL ({exc}): give http://IP:PORT") from exc
        if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query:
            raise BadEndpoint(f"{url} is not the URL of a gateway: give http://IP:PORT")
        try:
            ipaddress.ip_address(host)
        except ValueError as exc:
            raise BadEndpoint(f"{url} has a name: give http://IP:PORT, since a proxy sends requests to an IP") from exc
        return cls.of_ip(host, port or 80, operations_port)

    @classmethod
    def of_ip(cls, ip: str, port: int, operations_port: int | None = None) -> EndpointAddress:
        host = f"[{ip}]" if ":" in ip else ip
        return cls(f"{host}:{port}", f"http://{host}:{operations_port or port}/readyz")


@dataclass(slots=True, eq=False)
class PoolMember:
    """State of one endpoint, which a PoolMembers owns."""

    at: EndpointAddress
    is_ready: bool = False
    is_probed: bool = False
    num_timeouts: int = 0
    open_requests: int = 0  # that the endpoint reported
    reports_load: bool = False
    picks: set[Pick] = field(default_factory=set)  # that its last report does not include

    @property
    def load(self) -> int:
        return self.open_requests + len(self.picks)


@dataclass(slots=True, eq=False)
class Pick:
    """A request that was sent to an endpoint."""

    endpoint: PoolMember
    outcome: PickOutcome


class PoolMembers:
    """Owner of all endpoints. Not thread-safe: one event loop uses it."""

    def __init__(self, num_endpoints: int = 1, load_factor: float = LOAD_FACTOR) -> None:
        """Pick as many endpoints for a request as given: one, and those to try after it."""
        self._num_endpoints, self._load_factor = num_endpoints, load_factor
        self._by_address: dict[str, PoolMember] = {}
        self._is_known = False  # whether the members of the pool have been read
        self._has_settled = False

    def replace_members(self, members: Iterable[EndpointAddress]) -> None:
        """Add and remove endpoints so that these are the members; those that stay keep their state."""
        wanted = {one.address: one for one in members}
        for address in sorted(self._by_address.keys() - wanted.keys()):
            del self._by_address[address]
            log.info("endpoint_removed", endpoint=address)
        for address in sorted(wanted.keys() - self._by_address.keys()):
            self._by_address[address] = PoolMember(wanted[address])
            log.info("endpoint_added", endpoint=address)
        self._is_known = True

    def all(self) -> list[PoolMember]:
        return list(self._by_address.values())

    def is_settled(self) -> bool:
        """Return whether the first members are known, and each of them has been probed."""
        self._has_settled |= self._is_known and all(one.is_probed for one in self._by_address.values())
        return self._has_settled

    def begin_probe(self, endpoint: PoolMember) -> set[Pick]:
        """Return the picks that the answer of the probe that starts now includes."""
        return set(endpoint.picks)

    def end_probe(self, endpoint: PoolMember, included: set[Pick], open_requests: int | None) -> None:
        """Store that the endpoint is ready; without a number, the load is that of this picker's own requests."""
        endpoint.reports_load = open_requests is not None
        if open_requests is not None:
            endpoint.open_requests = open_requests
            endpoint.picks -= included
        endpoint.num_timeouts = 0
        self._set_ready(endpoint, True, "")

    def fail_probe(self, endpoint: PoolMember, reason: str) -> None:
        """Store that the endpoint refuses requests or cannot be reached."""
        self._set_ready(endpoint, False, reason)

    def time_out_probe(self, endpoint: PoolMember, reason: str) -> None:
        """Store that a probe was not answered in time, which a busy gateway can miss once."""
        endpoint.num_timeouts += 1
        if endpoint.num_timeouts >= MAX_TIMEOUTS or not endpoint.is_ready:
            self._set_ready(endpoint, False, reason)

    def pick(self, affinity: bytes | None, subset: Collection[str] | None) -> tuple[list[str], Pick | None]:
        """Return the endpoints for a request in the order of trial, and its count; empty if none is ready.

        With a `subset` of addresses, or of IPs, only these are eligible.
        """
        ready = [
            Candidate(address, one.load)
            for address, one in self._by_address.items()
            if one.is_ready and (subset is None or address in subset or _ip_of(address) in subset)
        ]
        choice = pick_endpoints(ready, affinity, self._num_endpoints, self._load_factor)
        if not choice.addresses:
            return [], None
        pick = Pick(self._by_address[choice.addresses[0]], choice.outcome)
        pick.endpoint.picks.add(pick)
        return choice.addresses, pick

    def end_pick(self, pick: Pick, has_ended: bool) -> None:
        """Store that the proxy has closed the stream of a request, which may not have ended yet. Idempotent.

        A proxy that sends no bodies closes it before a streamed response has ended; such a request counts until the
        endpoint's next report.
        """
        if has_ended or not pick.endpoint.reports_load:
            pick.endpoint.picks.discard(pick)

    def _set_ready(self, endpoint: PoolMember, is_ready: bool, reason: str) -> None:
        if is_ready != endpoint.is_ready or not endpoint.is_probed:
            if is_ready:
                log.info("endpoint_ready", endpoint=endpoint.at.address)
            else:
                log.warning("endpoint_not_ready", endpoint=endpoint.at.address, reason=reason)
        endpoint.is_ready, endpoint.is_probed = is_ready, True


def _ip_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
