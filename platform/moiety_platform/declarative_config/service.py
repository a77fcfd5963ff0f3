"""Maintains the ledger of declarations within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.declarative_config.models import (
    MAX_DECLARED_NAME_LENGTH,
    MAX_SOURCE_LENGTH,
    Declaration,
    DeclaredKind,
)
from moiety_platform.declarative_config.schemas import NewDeclaration
from moiety_platform.errors import BadRequest, Conflict, NotFound
from moiety_platform.tenants.checks import is_id


async def list_declarations(session: AsyncSession) -> Sequence[Declaration]:
    """Return all declarations by kind and name."""
    return (await session.scalars(select(Declaration).order_by(Declaration.kind, Declaration.name))).all()


async def put_declaration(session: AsyncSession, new: NewDeclaration) -> Declaration:
    """Create or update a declaration. Raises BadRequest, or Conflict where another file declares the object."""
    _check(new.name, "name", MAX_DECLARED_NAME_LENGTH)
    _check(new.source, "source", MAX_SOURCE_LENGTH)
    if new.object_id is not None:
        _check(new.object_id, "object_id", MAX_DECLARED_NAME_LENGTH)
    if new.tenant_id is not None and not is_id(new.tenant_id):
        raise BadRequest("'tenant_id' is not a tenant's id.", param="tenant_id")
    record = await session.get(Declaration, (new.kind, new.name), with_for_update=True)
    if record is None:
        record = Declaration(kind=new.kind, name=new.name, source=new.source)
        session.add(record)
    if record.source != new.source:
        raise _declared_by(record.source)
    record.object_id, record.tenant_id = new.object_id, new.tenant_id
    try:
        await session.flush()
    except IntegrityError as exc:
        raise Conflict(
            "Another client changed this declaration at the same time; apply again.", code="declared_elsewhere"
        ) from exc
    return record


async def delete_declaration(session: AsyncSession, kind: DeclaredKind, name: str) -> Declaration:
    """Forget a declaration: the object counts as created manually from then on. Raises NotFound."""
    could_be = 0 < len(name) <= MAX_DECLARED_NAME_LENGTH and name.isprintable()
    record = await session.get(Declaration, (kind, name)) if could_be else None
    if record is None:
        raise NotFound("No declaration has this name; list them with GET /admin/v1/declarations.", param="name")
    await session.delete(record)
    return record


def _declared_by(source: str) -> Conflict:
    return Conflict(
        f"The file {source!r} declares this; change it there, or apply as that file (--source {source}).",
        code="declared_elsewhere",
    )


def _check(text: str, param: str, longest: int) -> None:
    if not (0 < len(text) <= longest and text.isprintable()):
        raise BadRequest(f"'{param}' must have 1 to {longest} printable characters.", param=param)
