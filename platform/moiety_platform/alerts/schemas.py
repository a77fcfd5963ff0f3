"""Response bodies of the admin API for alerts."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from moiety_platform.alerts.models import AlertCondition, OperationalAlert
from moiety_platform.quota.kinds import LimitKind, show_amount
from moiety_platform.quota.models import QuotaAlert


class ConditionView(msgspec.Struct, frozen=True):
    """A condition that fires now: an engine is down, a disk is nearly full, or a class burns its error budget."""

    id: str
    group: str
    subject: str
    since: datetime

    @classmethod
    def of(cls, row: AlertCondition) -> ConditionView:
        return cls(row.id, row.kind, row.subject, datetime.fromtimestamp(row.since_ms / 1000, UTC))


class AlertView(msgspec.Struct, frozen=True):
    """An alert, as webhooks have received it. `tenant_id` is that of a quota; null for other alerts."""

    id: str
    type: str
    at: datetime
    status: str
    severity: str
    subject: str
    summary: str
    tenant_id: str | None

    @classmethod
    def of_condition(cls, alert: OperationalAlert) -> AlertView:
        return cls(
            alert.id, alert.type, alert.at, alert.status, alert.severity, alert.subject, alert.summary, tenant_id=None
        )

    @classmethod
    def of_quota(cls, alert: QuotaAlert) -> AlertView:
        used, cap = (show_amount(LimitKind(alert.kind), amount) for amount in (alert.used, alert.cap))
        return cls(
            alert.id,
            "quota.threshold",
            alert.at,
            "firing",
            "critical" if alert.percent == 100 else "warning",
            f"{alert.level} {alert.scope_id}",
            f"{alert.percent} % of {alert.kind} is used: {used} of {cap}",
            alert.tenant_id,
        )


class AlertReport(msgspec.Struct, frozen=True):
    """Conditions that fire now, and the newest alerts, newest first."""

    firing: list[ConditionView]
    data: list[AlertView]
