"""SQL statements that read and change leases.

Each statement covers the windows that a call gives, and is the same for any number of windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Dialect, Select, func, literal, select, tuple_, update

from moiety_platform.db.bulk import BulkAdd, BulkInsert, BulkStatement
from moiety_platform.db.dialect import insert_of
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease, QuotaWindow

_WINDOW = ("quota_id", "start")
_LEASE = (*_WINDOW, "replica_id")
_WINDOW_KEY = (QuotaWindow.quota_id, QuotaWindow.start)
_LEASE_KEY = (QuotaLease.quota_id, QuotaLease.start)

open_windows = BulkInsert(QuotaWindow, lambda insert: insert.on_conflict_do_nothing())
grant_windows = BulkAdd(QuotaWindow, "granted", _WINDOW)
settle_windows = BulkAdd(QuotaWindow, "settled", _WINDOW)
grant_leases = BulkAdd(QuotaLease, "granted", _LEASE)
settle_leases = BulkAdd(QuotaLease, "settled", _LEASE)

windows_alone = BulkStatement(  # to lock them
    _WINDOW_KEY,
    lambda given, _: (
        select(QuotaWindow.quota_id).where(tuple_(*_WINDOW_KEY).in_(given)).order_by(*_WINDOW_KEY).with_for_update()
    ),
)
leases_of_all = BulkStatement(  # (quota id, start, replica id, amount left), locked
    _WINDOW_KEY,
    lambda given, _: (
        select(*_LEASE_KEY, QuotaLease.replica_id, QuotaLease.granted - QuotaLease.settled)
        .where(tuple_(*_LEASE_KEY).in_(given))
        .order_by(*_LEASE_KEY, QuotaLease.replica_id)
        .with_for_update()
    ),
)


class LeaseStatements:
    """Statements of one replica, whose leases are valid until `expires_ms`."""

    def __init__(self, replica_id: str, expires_ms: Callable[[], ColumnElement[int]]) -> None:
        self._replica_id = replica_id
        self._expires_ms = expires_ms
        self.mine_alone = BulkStatement(_WINDOW_KEY, self._lock_mine)
        self.mine = BulkStatement(_WINDOW_KEY, self._read_mine)  # (quota id, start, granted, settled)
        self.renew = BulkStatement(_WINDOW_KEY, self._renew)
        # adds to leases, makes those that are missing, and renews all: (quota id, start, granted, settled)
        self.grant = BulkStatement([*_WINDOW_KEY, QuotaLease.granted], self._grant)
        self.windows = BulkStatement(
            _WINDOW_KEY, self._read_windows
        )  # (id, start, granted, cap, other replicas), locked

    def _are_mine(self, given: Select[Any]) -> tuple[ColumnElement[bool], ...]:
        return QuotaLease.replica_id == self._replica_id, tuple_(*_LEASE_KEY).in_(given)

    def _lock_mine(self, given: Select[Any], _: Dialect) -> Any:
        return select(*_LEASE_KEY).where(*self._are_mine(given)).order_by(*_LEASE_KEY).with_for_update()

    def _read_mine(self, given: Select[Any], _: Dialect) -> Any:
        return select(*_LEASE_KEY, QuotaLease.granted, QuotaLease.settled).where(*self._are_mine(given))

    def _renew(self, given: Select[Any], _: Dialect) -> Any:
        values = {"expires_ms": self._expires_ms(), "state": LeaseState.LIVE}
        return update(QuotaLease).where(*self._are_mine(given)).values(values)

    def _grant(self, given: Select[Any], dialect: Dialect) -> Any:
        others: dict[str, ColumnElement[Any]] = {
            "replica_id": literal(self._replica_id),
            "settled": literal(0),
            "expires_ms": self._expires_ms(),
            "state": literal(LeaseState.LIVE.value),
        }
        leases = given.add_columns(*others.values())
        insert = insert_of(dialect, QuotaLease).from_select([*_WINDOW, "granted", *others], leases)
        changed = {
            "granted": QuotaLease.granted + insert.excluded.granted,
            "expires_ms": insert.excluded.expires_ms,
            "state": insert.excluded.state,
        }
        return insert.on_conflict_do_update(index_elements=list(_LEASE), set_=changed).returning(
            *_LEASE_KEY, QuotaLease.granted, QuotaLease.settled
        )

    def _read_windows(self, given: Select[Any], _: Dialect) -> Any:
        sharing = (
            select(func.count())
            .where(
                QuotaLease.quota_id == QuotaWindow.quota_id,
                QuotaLease.start == QuotaWindow.start,
                QuotaLease.state == LeaseState.LIVE,
                QuotaLease.replica_id != self._replica_id,
            )
            .scalar_subquery()
        )
        return (
            select(*_WINDOW_KEY, QuotaWindow.granted, Quota.cap, sharing.label("others"))
            # windows whose limit was deleted are locked in order, too
            .outerjoin(Quota, Quota.id == QuotaWindow.quota_id)
            .where(tuple_(*_WINDOW_KEY).in_(given))
            .order_by(*_WINDOW_KEY)
            .with_for_update(of=QuotaWindow)
        )
