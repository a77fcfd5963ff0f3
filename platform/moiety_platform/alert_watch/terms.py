"""Observations of conditions, and the texts of their alerts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moiety_platform.alerts.models import AlertSeverity, AlertType
from moiety_platform.webhooks.terms import EventGroup

STARTS: Mapping[EventGroup, AlertType] = {
    EventGroup.ENGINE: AlertType.ENGINE_DOWN,
    EventGroup.SLO: AlertType.SLO_BURN_RATE,
    EventGroup.DISK: AlertType.DISK_NEARLY_FULL,
}
ENDS: Mapping[EventGroup, AlertType] = {
    EventGroup.ENGINE: AlertType.ENGINE_UP,
    EventGroup.SLO: AlertType.SLO_RECOVERED,
    EventGroup.DISK: AlertType.DISK_RECOVERED,
}


@dataclass(frozen=True, slots=True)
class Observation:
    """State of one subject as a gateway sees it.

    `is_bad` None: between the bounds, so that neither begins nor ends. `summary` is the text of the alert that such a
    change makes.
    """

    group: EventGroup
    subject: str
    is_bad: bool | None
    summary: str
    severity: AlertSeverity = AlertSeverity.CRITICAL
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.group.value, self.subject
