"""Outcome of a request at a replica, in the terms of a circuit breaker. Pure.

Faults of a client do not count: an invalid request, an exceeded limit, a disconnect. Other answers of our own engines
do not count either: verdicts of the scheduler, a draining engine, a missing adapter.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_platform.errors import EngineDied, EngineFailed, EngineOverloaded, EngineRefused, PlatformError, Unavailable


class OutcomeKind(StrEnum):
    """Outcome in terms of the replica's health."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"  # for its own reasons: key, permissions, account, models
    OVERLOADED = "overloaded"
    FAILED = "failed"  # the replica reported a failure
    BROKEN = "broken"  # the stream was cut or cannot be read
    UNREACHABLE = "unreachable"


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a request. `retry_after_s` is the replica's own Retry-After."""

    kind: OutcomeKind
    retry_after_s: float | None = None


SUCCESS = Outcome(OutcomeKind.SUCCEEDED)
_BY_CODE = {  # codes of Unavailable; other codes concern something else: the store, an adapter, a draining engine
    Unavailable.default_code: Outcome(OutcomeKind.UNREACHABLE),
    "overloaded": Outcome(OutcomeKind.OVERLOADED),  # one of our engines that is still loading its model
}


def outcome_of(error: PlatformError) -> Outcome | None:
    """Return the outcome of a request that a replica ended with that error; None where it says nothing about it."""
    match error:
        case EngineRefused():
            return None if error.blames_request else Outcome(OutcomeKind.REFUSED)
        case EngineOverloaded():
            return Outcome(OutcomeKind.OVERLOADED, error.retry_after_s if error.asks_to_wait else None)
        case EngineDied():
            return Outcome(OutcomeKind.BROKEN)
        case EngineFailed():
            return Outcome(OutcomeKind.BROKEN if error.upstream is None else OutcomeKind.FAILED)
        case Unavailable():
            return _BY_CODE.get(error.code)
    return None
