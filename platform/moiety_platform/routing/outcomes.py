"""How a request ended at a replica, in the terms that a circuit breaker learns from. Pure.

A client's own faults teach nothing: what is wrong with a request, a limit that refuses it, a client that leaves. Nor
does what an engine of ours says in other ways: its scheduler's verdicts, that it drains or lacks an adapter.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from moiety_platform.errors import EngineDied, EngineFailed, EngineOverloaded, EngineRefused, PlatformError, Unavailable


class OutcomeKind(StrEnum):
    """What the outcome says of the replica."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"  # for reasons of its own: its key, its permissions, its account, its models
    OVERLOADED = "overloaded"
    FAILED = "failed"  # it says that it failed
    BROKEN = "broken"  # the stream was cut or cannot be read
    UNREACHABLE = "unreachable"


class Outcome(msgspec.Struct, frozen=True):
    """`retry_after_s` is for how long the replica itself asks to get no requests."""

    kind: OutcomeKind
    retry_after_s: float | None = None


SUCCESS = Outcome(OutcomeKind.SUCCEEDED)
_BY_CODE = {  # of Unavailable; one with another code is of something else: the store, an adapter, an engine that drains
    Unavailable.default_code: Outcome(OutcomeKind.UNREACHABLE),
    "overloaded": Outcome(OutcomeKind.OVERLOADED),  # an engine of ours that loads its model still
}


def outcome_of(error: PlatformError) -> Outcome | None:
    """Return the outcome of a request that a replica ended with that error; None where it says nothing of it."""
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
