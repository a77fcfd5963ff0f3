"""`/admin/v1/alerts`: conditions that fire now, and the newest alerts. The admin router decides on access."""

from __future__ import annotations

from litestar import Controller, get
from litestar.di import NamedDependency
from sqlalchemy import select

from moiety_platform.access.actions import needs
from moiety_platform.access.views import READ_ALERTS
from moiety_platform.alerts.models import AlertCondition, ConditionState, OperationalAlert
from moiety_platform.alerts.schemas import AlertReport, AlertView, ConditionView
from moiety_platform.db.session import Database
from moiety_platform.quota.models import QuotaAlert

MAX_LISTED = 200


class AlertController(Controller):
    """Route of alerts."""

    path = "/alerts"
    tags = ("alerts",)

    @get(opt=needs(READ_ALERTS))
    async def list_alerts(self, database: NamedDependency[Database]) -> AlertReport:
        """List the conditions that fire now, and the 200 newest alerts.

        Administrators of one tenant get the alerts of its quotas.
        """
        firing = select(AlertCondition).where(AlertCondition.state == ConditionState.FIRING)
        conditions = select(OperationalAlert).order_by(OperationalAlert.at.desc(), OperationalAlert.id.desc())
        quotas = select(QuotaAlert).order_by(QuotaAlert.at.desc(), QuotaAlert.id.desc())
        async with database.read() as session:
            rows = await session.scalars(firing.order_by(AlertCondition.since_ms, AlertCondition.subject))
            now = [ConditionView.of(row) for row in rows]
            found = [AlertView.of_condition(one) for one in await session.scalars(conditions.limit(MAX_LISTED))]
            found += [AlertView.of_quota(one) for one in await session.scalars(quotas.limit(MAX_LISTED))]
        found.sort(key=lambda one: (one.at, one.id), reverse=True)
        return AlertReport(now, found[:MAX_LISTED])
