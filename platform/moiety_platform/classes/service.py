"""Creates, finds, changes and deletes service classes within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.classes.checks import (
    check_class_name,
    check_spot_bounds,
    check_terms,
    is_class_name,
    parse_action,
)
from moiety_platform.classes.models import ClassRecord
from moiety_platform.classes.schemas import ClassChange, NewClass
from moiety_platform.classes.terms import SHIPPED_NAMES, Catalogue, ClassTerms
from moiety_platform.errors import BadRequest, Conflict, NotFound
from moiety_wire.classes import OverloadAction, ServiceClass

MAX_CLASSES = 64  # each is a metric label, here and in every engine

_SERVICE_FIELDS = tuple(name for name in ServiceClass.__struct_fields__ if name not in ("name", "on_overload", "spot"))


async def load_classes(session: AsyncSession) -> Catalogue:
    """Return all classes, best first."""
    found = await session.scalars(select(ClassRecord).order_by(ClassRecord.rank, ClassRecord.name))
    return Catalogue({record.name: _terms_of(record) for record in found})


async def get_class(session: AsyncSession, name: str) -> ClassTerms:
    """Return the class. Raises NotFound."""
    return _terms_of(await _get(session, name))


async def require_class(session: AsyncSession, name: str) -> str:
    """Return the name if there is such a class. Raises BadRequest, which names the existing classes."""
    classes = await load_classes(session)
    if name not in classes:
        known = ", ".join(classes)
        raise BadRequest(f"There is no service class {name[:64]!r}; choose one of: {known}.", param="service_class")
    return name


async def create_class(session: AsyncSession, new: NewClass) -> ClassTerms:
    """Create a class. Raises BadRequest, or Conflict when the name is taken or there are too many."""
    spot = check_spot_bounds(new.spot_floor_percent, new.spot_ceiling_percent)
    service = ServiceClass(
        name=check_class_name(new.name),
        on_overload=parse_action(new.on_overload),
        spot=spot is not None,
        **{field: getattr(new, field) for field in _SERVICE_FIELDS},
    )
    terms = ClassTerms(service, new.price_factor, new.downgrade_to, new.credit_percent, spot)
    classes = await _lock_classes(session)
    taken = Conflict(f"A class {service.name!r} already exists; change it, or choose another name.")
    if service.name in classes:
        raise taken
    if len(classes) >= MAX_CLASSES:
        raise Conflict(f"The limit of {MAX_CLASSES} classes is reached; delete one that no tenant uses.")
    check_terms(terms, classes)
    record = ClassRecord(name=service.name)
    _write(record, terms)
    session.add(record)
    try:
        await session.flush()
    except IntegrityError as exc:
        raise taken from exc
    return terms


async def change_class(session: AsyncSession, name: str, change: ClassChange) -> ClassTerms:
    """Change the given fields. Raises NotFound or BadRequest."""
    classes = await _lock_classes(session)
    record = await _get(session, name)
    terms = apply_change(classes[name], change)
    check_terms(terms, classes)
    _write(record, terms)
    await session.flush()
    return terms


def apply_change(old: ClassTerms, change: ClassChange) -> ClassTerms:
    """Return the class with the change applied, not validated. Raises BadRequest for an unknown action on overload."""
    given = {field: value for field, value in msgspec.structs.asdict(change).items() if value is not msgspec.UNSET}
    if "on_overload" in given:
        given["on_overload"] = parse_action(given["on_overload"])
    floor, ceiling = old.spot or (None, None)
    spot = check_spot_bounds(given.pop("spot_floor_percent", floor), given.pop("spot_ceiling_percent", ceiling))
    return ClassTerms(
        price_factor=given.pop("price_factor", old.price_factor),
        downgrade_to=given.pop("downgrade_to", old.downgrade_to),
        credit_percent=given.pop("credit_percent", old.credit_percent),
        service=msgspec.structs.replace(old.service, **given, spot=spot is not None),
        spot=spot,
    )


async def delete_class(session: AsyncSession, name: str) -> ClassTerms:
    """Delete a class. Raises NotFound, or Conflict for a class that is shipped or in use."""
    classes = await _lock_classes(session)
    record = await _get(session, name)
    if name in SHIPPED_NAMES:
        raise Conflict(f"The built-in class {name!r} cannot be deleted; change it instead.", code="class_shipped")
    users = [other for other, terms in classes.items() if terms.downgrade_to == name]
    if users:
        raise Conflict(
            f"The class {', '.join(users)} falls back to {name!r}; change its 'downgrade_to' first.",
            code="class_in_use",
        )
    await session.delete(record)
    try:
        await session.flush()
    except IntegrityError as exc:
        raise Conflict(
            f"Tenants use the class {name!r}; assign another class to them first (moiety tenant change NAME "
            "--class …).",
            code="class_in_use",
        ) from exc
    return classes[name]


async def _lock_classes(session: AsyncSession) -> Catalogue:
    """Lock and return all classes, so that conditions between two classes stay true."""
    await session.execute(select(ClassRecord.name).order_by(ClassRecord.name).with_for_update())
    return await load_classes(session)


async def _get(session: AsyncSession, name: str) -> ClassRecord:
    record = await session.get(ClassRecord, name) if is_class_name(name) else None
    if record is None:
        raise NotFound(f"There is no class {name[:64]!r}; list the classes with GET /admin/v1/classes.", param="name")
    return record


def _terms_of(record: ClassRecord) -> ClassTerms:
    service = ServiceClass(
        name=record.name,
        on_overload=OverloadAction(record.on_overload),
        spot=record.spot_floor_percent is not None,
        **{field: getattr(record, field) for field in _SERVICE_FIELDS},
    )
    spot = None
    if record.spot_floor_percent is not None and record.spot_ceiling_percent is not None:
        spot = record.spot_floor_percent, record.spot_ceiling_percent
    return ClassTerms(service, record.price_factor, record.downgrade_to, record.credit_percent, spot)


def _write(record: ClassRecord, terms: ClassTerms) -> None:
    for field in _SERVICE_FIELDS:
        setattr(record, field, getattr(terms.service, field))
    record.on_overload = terms.service.on_overload.value
    record.price_factor = terms.price_factor
    record.credit_percent = terms.credit_percent
    record.downgrade_to = terms.downgrade_to
    record.spot_floor_percent, record.spot_ceiling_percent = terms.spot or (None, None)
