"""Roles that a process needs to send each message of the wire.

A gateway has the roles that the engine's list of gateway keys assigns to its public key; without keys, it has all
roles. A gateway accepts an engine's messages only from the engine that it connected to: with CURVE, from the process
with the secret key of `curve_server_key`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from moiety_wire.engine_load import Load
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery, ScaleExpertRanks
from moiety_wire.fleet_service import FleetService
from moiety_wire.messages import (
    Abort,
    Accepted,
    AdapterPart,
    Extend,
    Failed,
    Finished,
    Forget,
    Heartbeat,
    Hello,
    ModelCard,
    SleepCommand,
    Submit,
    Tokens,
    UnacknowledgedUsage,
    UsageAcknowledgement,
)
from moiety_wire.prefix_events import PrefixEvents, PrefixSubscription


class SenderRole(StrEnum):
    """Role of a sender."""

    INFERENCE = "inference"  # requests, their adapters and their usage
    ADMINISTRATION = "administration"  # sleep mode, expert ranks, deletion of tenants' data, figures of all tenants
    ENGINE = "engine"


GATEWAY_ROLES = frozenset({SenderRole.INFERENCE, SenderRole.ADMINISTRATION})
_INFERENCE = frozenset({SenderRole.INFERENCE})
_ADMINISTRATION = frozenset({SenderRole.ADMINISTRATION})
_ENGINE = frozenset({SenderRole.ENGINE})

ALLOWED_SENDERS: Mapping[type, frozenset[SenderRole]] = {
    Hello: GATEWAY_ROLES,
    Heartbeat: GATEWAY_ROLES,
    FleetService: GATEWAY_ROLES,
    Submit: _INFERENCE,
    Extend: _INFERENCE,
    Abort: _INFERENCE,
    AdapterPart: _INFERENCE,
    UsageAcknowledgement: _INFERENCE,
    PrefixSubscription: _INFERENCE,
    SleepCommand: _ADMINISTRATION,
    ExpertLoadQuery: _ADMINISTRATION,
    ScaleExpertRanks: _ADMINISTRATION,
    Forget: _ADMINISTRATION,
    ModelCard: _ENGINE,
    PrefixEvents: _ENGINE,
    Accepted: _ENGINE,
    Tokens: _ENGINE,
    Finished: _ENGINE,
    Failed: _ENGINE,
    Load: _ENGINE,
    UnacknowledgedUsage: _ENGINE,
    ExpertLoad: _ENGINE,
    ExpertBalance: _ENGINE,
}


def may_send(roles: frozenset[SenderRole], message: object) -> bool:
    """Return whether a sender with these roles may send the message; one role of those allowed is enough."""
    return not roles.isdisjoint(ALLOWED_SENDERS.get(type(message), frozenset()))
