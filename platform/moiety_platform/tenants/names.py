"""Equality of tenant and project names, and placeholders that no name can block.

Two names are equal if they match after NFC, case folding and NFC again. Each row keeps that form in `folded_name`,
under a unique index. Rows from a gateway of the previous release lack it until the next check.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, and_, exists, inspect, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from moiety_platform.db.session import UNRESTRICTED
from moiety_platform.errors import BadRequest
from moiety_platform.tenants.checks import check_name
from moiety_platform.tenants.models import Project, Tenant, fold_name

PLACEHOLDER = "erased"

Named = TypeVar("Named", Tenant, Project)

_ID_FORM = re.compile(r"(?:erased-)?(?:ada|batch|evt|file|prj|quo|sim|ten|whk)_[a-z0-9]{20}(?:-[0-9a-f]{8})?")
_SUFFIX_BYTES = 4
_FOLDED_AT_ONCE = 500


def check_new_name(name: str) -> str:
    """Return a name for a tenant or project in NFC. Raises BadRequest.

    Refuses also a name that looks like an id or like the placeholder of an erased name.
    """
    name = check_name(name)
    if _ID_FORM.fullmatch(fold_name(name)):
        raise BadRequest("'name' must not look like an id; choose another name.", param="name")
    return name


def is_named(table: type[Named], name: str) -> ColumnElement[bool]:
    """Return the condition for rows with this name. An exact match hides rows that only fold to the same name."""
    name, other = check_name(name), aliased(table)
    same = [other.name == name]
    if issubclass(table, Project):
        same.append(inspect(other).selectable.c.tenant_id == table.tenant_id)
    exact = exists(select(other.id).where(*same)).correlate(table)
    return or_(table.name == name, and_(table.folded_name == fold_name(name), ~exact))


async def fold_missing_names(session: AsyncSession, table: type[Named]) -> None:
    """Fill in the folded names of rows that a gateway of the previous release has created.

    Where the folded name is taken, the row's id makes it unique.
    """
    wanted = select(table).where(table.folded_name.is_(None)).order_by(table.created_at, table.id)
    found = await session.scalars(wanted.limit(_FOLDED_AT_ONCE).execution_options(**UNRESTRICTED))
    for row in found.all():
        try:
            async with session.begin_nested():
                row.folded_name = fold_name(row.name)
                await session.flush()
        except IntegrityError:
            await session.refresh(row)
            row.folded_name = f"{fold_name(row.name)}\t{row.id}"
            await session.flush()


async def replace_names(session: AsyncSession, table: type[Named], where: Sequence[Any]) -> int:
    """Replace names by placeholders, bypassing the audit log; return the number of changed rows.

    A placeholder that another row's name blocks gets a random suffix.
    """
    columns = table.id, table.name, table.folded_name
    rows = (await session.execute(select(*columns).where(*where, _is_not_replaced(table)))).all()
    num_changed = 0
    for row_id, name, folded_name in rows:
        placeholder = f"{PLACEHOLDER}-{row_id}"
        suffixed = re.escape(placeholder) + rf"-[0-9a-f]{{{2 * _SUFFIX_BYTES}}}"
        if re.fullmatch(suffixed, name) and folded_name == fold_name(name):
            continue
        await _replace_name(session, table, row_id, placeholder)
        num_changed += 1
    return num_changed


def _is_not_replaced(table: type[Named]) -> ColumnElement[bool]:
    placeholder: ColumnElement[str] = f"{PLACEHOLDER}-" + table.id
    return or_(table.name != placeholder, table.folded_name.is_distinct_from(placeholder))


async def _replace_name(session: AsyncSession, table: type[Named], row_id: str, placeholder: str) -> None:
    connection = await session.connection()
    name = placeholder
    while True:
        values = {"name": name, "folded_name": fold_name(name)}
        try:
            async with connection.begin_nested():
                await connection.execute(update(table).where(table.id == row_id).values(values))
        except IntegrityError:
            name = f"{placeholder}-{secrets.token_hex(_SUFFIX_BYTES)}"
        else:
            return
