"""Sets, finds and deletes issuers of JWTs within the caller's transaction. Independent of HTTP.

Each grant has a key without text, as which its tokens act: quotas, usage and revocation are those of a key.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.keys import generate_key
from moiety_platform.auth.principal import INFERENCE_SCOPE
from moiety_platform.auth.service import check_models
from moiety_platform.classes.models import ClassRecord
from moiety_platform.classes.service import require_class
from moiety_platform.db.row_limits import get_or_add
from moiety_platform.errors import BadRequest, Conflict, NotFound
from moiety_platform.jwt_issuers.models import EVERY_TOKEN, JwtGrantRecord, JwtIssuerRecord
from moiety_platform.jwt_issuers.schemas import JwtGrantView, JwtIssuerView, NewJwtIssuer
from moiety_platform.jwt_issuers.submitted_issuer import HttpAddresses, check_issuer
from moiety_platform.jwt_issuers.terms import JwtGrant, JwtIssuer, JwtIssuers
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.tenants.names import is_named
from moiety_platform.tenants.service import get_project, get_undeleted_tenant
from moiety_wire.shared_fields import copy_fields

MAX_ISSUERS = 64
KEY_HINT = "(jwt)"
"""Hint of keys without text, in the place of a key's last characters."""
SECRET_HASH_BYTES = 32


async def load_issuers(session: AsyncSession) -> JwtIssuers:
    """Return all issuers as requests read them."""
    granted: defaultdict[str, list[JwtGrant]] = defaultdict(list)
    for grant in await session.scalars(select(JwtGrantRecord).order_by(JwtGrantRecord.position)):
        granted[grant.issuer_name].append(JwtGrant(grant.claim_value or None, grant.key_id))
    by_url: defaultdict[str, list[JwtIssuer]] = defaultdict(list)
    for record in await session.scalars(select(JwtIssuerRecord).order_by(JwtIssuerRecord.name)):
        by_url[record.url].append(_terms_of(record, granted[record.name]))
    ranks = {row.name: row.rank for row in await session.execute(select(ClassRecord.name, ClassRecord.rank))}
    classes = {
        grant.key_id: issuer.service_class
        for named in by_url.values()
        for issuer in named
        if issuer.service_class is not None
        for grant in issuer.grants
    }
    return JwtIssuers(dict(by_url), ranks, classes)


async def list_issuers(session: AsyncSession) -> list[JwtIssuerView]:
    """Return all issuers by name."""
    records = (await session.scalars(select(JwtIssuerRecord).order_by(JwtIssuerRecord.name))).all()
    return [await _view_of(session, record) for record in records]


async def find_issuer(session: AsyncSession, name: str) -> JwtIssuerView | None:
    """Return the issuer, or None."""
    record = await session.get(JwtIssuerRecord, name) if name.isascii() and name.isprintable() else None
    return None if record is None else await _view_of(session, record)


async def get_issuer(session: AsyncSession, name: str) -> JwtIssuerView:
    """Return the issuer. Raises NotFound."""
    found = await find_issuer(session, name)
    if found is None:
        raise NotFound("There is no issuer with this name; list them with GET /admin/v1/issuers.", param="name")
    return found


async def set_issuer(
    session: AsyncSession, new: NewJwtIssuer, reach: HttpAddresses, now: datetime
) -> tuple[JwtIssuerView, list[str]]:
    """Set or replace an issuer; return it and the ids of the keys that changed.

    A grant for another project, or whose key was revoked, gets another key. Keys that no grant has any more are revoked
    for good. Raises BadRequest, NotFound, or Conflict.
    """
    check_issuer(new, reach)
    if new.service_class is not None:
        await require_class(session, new.service_class)
    same = select(JwtIssuerRecord.name).where(
        JwtIssuerRecord.url == new.url, JwtIssuerRecord.audience == new.audience, JwtIssuerRecord.name != new.name
    )
    if (other := await session.scalar(same)) is not None:
        message = f"The issuer {other!r} has this URL and audience already; change it, or give another audience."
        raise Conflict(message, param="audience")
    record = await get_or_add(session, JwtIssuerRecord, {"name": new.name}, MAX_ISSUERS, "issuers", "delete one")
    record.url, record.audience, record.claim = new.url, new.audience, new.claim
    record.jwks_url, record.jwks = new.jwks_url, None if new.jwks is None else json.dumps(new.jwks)
    record.required_claims, record.end_user_claim = dict(new.required_claims), new.end_user_claim
    record.service_class, record.models = new.service_class, check_models(new.models, "models")
    await session.flush()
    changed = await _set_grants(session, record, new, now)
    return await _view_of(session, record), changed


async def delete_issuer(session: AsyncSession, name: str, now: datetime) -> tuple[JwtIssuerView, list[str]]:
    """Delete an issuer and revoke the keys of its grants; return its last state and their ids. Raises NotFound."""
    found = await get_issuer(session, name)
    for grant in await _grants_of(session, name):
        await _end_grant(session, grant, now)
    await session.flush()
    await session.delete(await session.get_one(JwtIssuerRecord, name))
    await session.flush()
    return found, found.key_ids


async def _set_grants(session: AsyncSession, record: JwtIssuerRecord, new: NewJwtIssuer, now: datetime) -> list[str]:
    """Replace the grants of an issuer; return the ids of the keys that changed."""
    before = {grant.claim_value: grant for grant in await _grants_of(session, record.name)}
    changed = [grant.key_id for grant in before.values()]
    projects = [await _find_project(session, grant.project) for grant in new.grants]
    for grant, project in zip(new.grants, projects, strict=True):
        value = grant.claim_value or EVERY_TOKEN
        old = before.get(value)
        if old is not None:
            key = await session.get_one(ApiKey, old.key_id)
            if key.project_id == project.id and key.revoked_at is None:
                del before[value]
    for old in before.values():
        await _end_grant(session, old, now)
    await session.flush()  # before grants with the same claim values are added
    kept = {grant.claim_value: grant for grant in await _grants_of(session, record.name)}
    for position, (grant, project) in enumerate(zip(new.grants, projects, strict=True)):
        value = grant.claim_value or EVERY_TOKEN
        models = check_models(grant.models, "models")
        allowed = models if models is not None else record.models
        granted = kept.get(value)
        if granted is None:
            key = _new_key(record, grant.claim_value, project, allowed, now)
            session.add(key)
            await session.flush()
            granted = JwtGrantRecord(
                issuer_name=record.name, claim_value=value, position=position, key_id=key.id, models=models,
                tenant_id=project.tenant_id,
            )  # fmt: skip
            session.add(granted)
        else:
            granted.position, granted.models = position, models
            (await session.get_one(ApiKey, granted.key_id)).allowed_models = allowed
    await session.flush()
    return changed


def _new_key(
    record: JwtIssuerRecord, claim_value: str | None, project: Project, models: list[str] | None, now: datetime
) -> ApiKey:
    name = f"jwt {record.name}" if claim_value is None else f"jwt {record.name} {claim_value}"
    return ApiKey(
        id=generate_key().key_id,
        project_id=project.id,
        name=name[:100].rstrip(),
        secret_hash=secrets.token_bytes(SECRET_HASH_BYTES),  # of no text
        hint=KEY_HINT,
        scopes=[INFERENCE_SCOPE],
        allowed_models=models,
        created_at=now,
    )


async def _end_grant(session: AsyncSession, grant: JwtGrantRecord, now: datetime) -> None:
    key = await session.get_one(ApiKey, grant.key_id)
    if key.revoked_at is None:
        key.revoked_at = now
    await session.delete(grant)


async def _grants_of(session: AsyncSession, issuer_name: str) -> Sequence[JwtGrantRecord]:
    mine = select(JwtGrantRecord).where(JwtGrantRecord.issuer_name == issuer_name)
    return (await session.scalars(mine.order_by(JwtGrantRecord.position))).all()


async def _find_project(session: AsyncSession, text: str) -> Project:
    """Return the project of an id, or of the names of its tenant and its own. Raises BadRequest or NotFound."""
    if "/" not in text:
        project = await get_project(session, text)
    else:
        found = [project async for project in _projects_named(session, text)]
        if not found:
            message = f"There is no project {text[:200]!r}: give the names as TENANT/PROJECT, or the id of the project."
            raise NotFound(message, param="grants")
        if len(found) > 1:
            raise BadRequest(f"{text[:200]!r} names several projects: give the id of one.", param="grants")
        (project,) = found
    await get_undeleted_tenant(session, project.tenant_id)
    return project


async def _projects_named(session: AsyncSession, text: str) -> AsyncIterator[Project]:
    """Yield the projects of the names TENANT/PROJECT, at each slash that can separate them."""
    for tenant_name, project_name in _splits(text):
        named = (
            select(Project)
            .join(Tenant, Tenant.id == Project.tenant_id)
            .where(is_named(Tenant, tenant_name), is_named(Project, project_name))
        )
        for project in await session.scalars(named):
            yield project


def _splits(text: str) -> Iterator[tuple[str, str]]:
    parts = text.split("/")
    for at in range(1, len(parts)):
        tenant_name, project_name = "/".join(parts[:at]), "/".join(parts[at:])
        if tenant_name and project_name:
            yield tenant_name, project_name


def _terms_of(record: JwtIssuerRecord, grants: Sequence[JwtGrant]) -> JwtIssuer:
    return copy_fields(record, JwtIssuer, grants=tuple(grants))


async def _view_of(session: AsyncSession, record: JwtIssuerRecord) -> JwtIssuerView:
    named = (
        select(JwtGrantRecord, Tenant.name, Project.name)
        .join(ApiKey, ApiKey.id == JwtGrantRecord.key_id)
        .join(Project, Project.id == ApiKey.project_id)
        .join(Tenant, Tenant.id == Project.tenant_id)
        .where(JwtGrantRecord.issuer_name == record.name)
        .order_by(JwtGrantRecord.position)
    )
    rows = (await session.execute(named)).all()
    return JwtIssuerView(
        name=record.name,
        url=record.url,
        audience=record.audience,
        grants=[
            JwtGrantView(f"{tenant}/{project}", grant.claim_value or None, grant.models)
            for grant, tenant, project in rows
        ],
        claim=record.claim,
        required_claims=record.required_claims,
        jwks_url=record.jwks_url,
        jwks=None if record.jwks is None else json.loads(record.jwks),
        end_user_claim=record.end_user_claim,
        service_class=record.service_class,
        models=record.models,
        key_ids=[grant.key_id for grant, _, _ in rows],
    )
