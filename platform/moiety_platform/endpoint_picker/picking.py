"""Choice of an endpoint for a request: rendezvous hashing of the client's key, with bounded load. Pure functions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

LOAD_FACTOR = 1.25  # times the mean load, rounded up, is the most that an endpoint gets
WEIGHT_BYTES = 8


class PickOutcome(StrEnum):
    """Result of the choice of an endpoint for one request."""

    PREFERRED = "preferred"  # the first endpoint in the order of the client's key
    MOVED = "moved"  # another one, since the first has no room
    NO_KEY = "no_key"  # the endpoint with the least load
    NONE_READY = "none_ready"
    NO_MEMBERS = "no_members"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An endpoint that can serve requests, as `ip:port`, and the number of requests that it is serving."""

    address: str
    load: int


@dataclass(frozen=True, slots=True)
class EndpointChoice:
    """Endpoint for a request, then those to try after it; empty if there is none."""

    addresses: list[str]
    outcome: PickOutcome


def most_load(loads: Collection[int], factor: float = LOAD_FACTOR) -> int:
    """Return the largest load that an endpoint may have after the next request.

    Consistent hashing with bounded loads, Mirrokni, Thorup and Zadimoghaddam (2018): the factor times the mean, rounded
    up. Some endpoint is always below it.
    """
    return math.ceil(factor * (sum(loads) + 1) / len(loads))


def pick_endpoints(
    candidates: Sequence[Candidate], affinity: bytes | None, num_endpoints: int = 1, factor: float = LOAD_FACTOR
) -> EndpointChoice:
    """Choose the endpoint for a request, and those to try after it.

    `affinity` is the hash of the client's key. Requests with one key go to the first endpoint in the key's rendezvous
    order that has room; an endpoint that joins or leaves moves only the keys that prefer it. A request without a key
    goes to the endpoint with the least load.
    """
    if not candidates:
        return EndpointChoice([], PickOutcome.NONE_READY)
    if affinity is None:
        ordered = sorted(candidates, key=lambda one: (one.load, one.address))
        outcome = PickOutcome.NO_KEY
    else:
        ordered = sorted(candidates, key=lambda one: rendezvous_weight(affinity, one.address), reverse=True)
        most = most_load([one.load for one in candidates], factor)
        with_room = [one for one in ordered if one.load < most]
        outcome = PickOutcome.PREFERRED if with_room[0] is ordered[0] else PickOutcome.MOVED
        ordered = [*with_room[:1], *(one for one in ordered if one is not with_room[0])]
    return EndpointChoice([one.address for one in ordered[:num_endpoints]], outcome)


def rendezvous_weight(affinity: bytes, address: str) -> bytes:
    """Return the weight of an endpoint for a key; the one with the largest is preferred."""
    return hashlib.blake2b(address.encode(), key=affinity, digest_size=WEIGHT_BYTES).digest()
