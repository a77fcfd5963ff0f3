"""Writer of the audit log: records the inserts, changes and deletes of the audited tables in the same transaction.

The changes are read from the session itself, so no endpoint can forget one. A statement that bypasses the session's
objects must report its change with `note`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import event, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, UOWTransaction

from moiety_platform.access.roles import Role
from moiety_platform.audit.chain import FIELDS, GENESIS, OPTIONAL_FIELDS, VERSION, digest, entry_hash
from moiety_platform.audit.models import SALT_LENGTH, AuditEntry
from moiety_platform.clock import Clock
from moiety_platform.db.base import Base
from moiety_platform.db.session import UNRESTRICTED, Database

_CHANGES = "moiety_audit_changes"
_UNLOGGED = frozenset(
    {"secret_hash", "pepper_mark", "folded_name", "invitation_hash", "routing_key"}
)  # secrets, and values derived from others
_ADVISORY_LOCK = 0x6175_6469  # "audi"


@dataclass(frozen=True, slots=True)
class Change:
    """One change to one row, in the form that the log keeps."""

    action: str  # create, change, delete, erase
    object_kind: str  # name of the table
    object_id: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


TenantOf = Callable[[AsyncSession, Change], Awaitable[str | None]]  # tenant of the changed object; None: no tenant


class DryRunPassed(Exception):
    """A dry run would have been committed; its transaction is rolled back."""


@dataclass(frozen=True, slots=True)
class AuditedStore:
    """Database access of one administrator, whose changes are logged.

    `role` is its current role, None for the platform itself. With `is_dry_run` each transaction is checked and rolled
    back.
    """

    database: Database
    actor: str
    role: Role | None
    tenant_of: TenantOf
    clock: Clock
    is_dry_run: bool = False

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction whose changes are logged; changes and log roll back together.

        Raises DryRunPassed instead of the commit of a dry run.
        """
        async with self.database.write() as session:
            await _lock(session)  # first, so that the logged `before` is the true previous state
            changes: list[Change] = []
            session.info[_CHANGES] = changes
            event.listen(session.sync_session, "after_flush", _collect)
            yield session
            await session.flush()
            event.remove(session.sync_session, "after_flush", _collect)
            await self._append(session, changes)
            if self.is_dry_run:
                raise DryRunPassed

    async def _append(self, session: AsyncSession, changes: list[Change]) -> None:
        """Append to the end of the chain, which the caller has locked."""
        if not changes:
            return
        newest = select(AuditEntry).order_by(AuditEntry.seq.desc()).limit(1).execution_options(**UNRESTRICTED)
        last = (await session.scalars(newest)).first()
        seq, previous = (0, GENESIS) if last is None else (last.seq, last.hash)
        now = self.clock.now()
        for change in changes:
            seq += 1
            fields: dict[str, Any] = {
                "version": VERSION,
                "salt": secrets.token_hex(SALT_LENGTH // 2),
                "seq": seq,
                "at": now.isoformat(),
                "actor": self.actor,
                "actor_role": self.role,
                "action": change.action,
                "object_kind": change.object_kind,
                "object_id": change.object_id,
                "before": _plain(change.before),
                "after": _plain(change.after),
            }
            fields["digest"] = digest(fields["salt"], fields)
            previous = entry_hash(previous, fields)
            names = (*FIELDS, *OPTIONAL_FIELDS, "version", "salt", "digest")
            columns = {name: fields[name] for name in names if name != "at"}
            tenant_id = await self.tenant_of(session, change)
            session.add(AuditEntry(**columns, at=now, tenant_id=tenant_id, hash=previous))
        await session.flush()


def note(session: AsyncSession, change: Change) -> None:
    """Report a change that bypassed the session's objects. No effect where nothing is logged."""
    session.info.get(_CHANGES, []).append(change)


async def _lock(session: AsyncSession) -> None:
    """Block all other logged changes until this transaction ends. SQLite has only one writer anyway."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})


def row_of(record: Base) -> dict[str, Any]:
    """Return a row's columns without those that must not be logged."""
    state = inspect(record)
    return {
        attribute.key: getattr(record, attribute.key)
        for attribute in state.mapper.column_attrs
        if attribute.key not in _UNLOGGED
    }


def _collect(session: Session, _context: UOWTransaction) -> None:
    changes: list[Change] = session.info[_CHANGES]
    changes += [_change("create", record, None, row_of(record)) for record in session.new]
    for record in session.dirty:
        before = _before(record)
        if before != (after := row_of(record)):
            changes.append(_change("change", record, before, after))
    changes += [_change("delete", record, row_of(record), None) for record in session.deleted]


def _before(record: Base) -> dict[str, Any]:
    """Return the row as it was before the flush that has just been sent."""
    state = inspect(record)
    was = row_of(record)
    for name in was:
        history = state.attrs[name].history
        if history.deleted:
            was[name] = history.deleted[0]
    return was


def _change(action: str, record: Base, before: dict[str, Any] | None, after: dict[str, Any] | None) -> Change:
    mapper = inspect(record).mapper
    identity = "/".join(str(part) for part in mapper.primary_key_from_instance(record))
    return Change(action, record.__tablename__, identity, before, after)


def _plain(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the row in the form that JSON stores."""
    if row is None:
        return None
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
