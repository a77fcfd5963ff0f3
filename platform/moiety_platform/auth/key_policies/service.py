"""Sets, finds and deletes key policies within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.key_policies.models import KeyPolicy
from moiety_platform.auth.key_policies.schemas import (
    MAX_DAYS,
    MAX_KEYS_OF_USER,
    KeyPolicyPage,
    KeyPolicyView,
    NewKeyPolicy,
)
from moiety_platform.auth.service import check_models
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.quota.kinds import MAX_CAP, MAX_RATE, Meter
from moiety_platform.quota.schemas import caps_by_kind
from moiety_platform.tenants.checks import is_id
from moiety_platform.tenants.models import Tenant
from moiety_platform.tenants.service import get_tenant, get_undeleted_tenant


async def find_policy(session: AsyncSession, tenant_id: str) -> KeyPolicy | None:
    """Return the policy of a tenant; None if it has none."""
    return await session.get(KeyPolicy, tenant_id) if is_id(tenant_id) else None


async def get_policy(session: AsyncSession, tenant_id: str) -> KeyPolicy:
    """Return the policy of a tenant. Raises NotFound."""
    found = await find_policy(session, tenant_id)
    if found is None:
        raise NotFound(
            "This tenant has no key policy, so its developers make no keys; set one with PUT /admin/v1/key-policies.",
            param="tenant_id",
        )
    return found


async def list_policies(session: AsyncSession, page: PageRequest, tenant_id: str | None) -> KeyPolicyPage:
    """Return policies, those of the oldest tenants first. Raises NotFound for an unknown tenant."""
    statement = select(Tenant).where(Tenant.id.in_(select(KeyPolicy.tenant_id)))
    if tenant_id is not None:
        statement = statement.where(Tenant.id == (await get_tenant(session, tenant_id)).id)
    tenants, next_cursor = await read_page(session, statement, page, Tenant.created_at, Tenant.id)
    policies = [await get_policy(session, tenant.id) for tenant in tenants]
    return KeyPolicyPage([KeyPolicyView.of(policy) for policy in policies], next_cursor)


async def set_policy(session: AsyncSession, new: NewKeyPolicy) -> KeyPolicy:
    """Set or replace the policy of a tenant. Raises BadRequest, NotFound, or Conflict for an erased tenant."""
    tenant = await get_undeleted_tenant(session, new.tenant_id)
    if not 0 <= new.max_keys <= MAX_KEYS_OF_USER:
        raise BadRequest(f"'max_keys' must be from 0 to {MAX_KEYS_OF_USER}.", param="max_keys")
    if new.max_days is not None and not 1 <= new.max_days <= MAX_DAYS:
        raise BadRequest(f"'max_days' must be from 1 to {MAX_DAYS}, or null for no bound.", param="max_days")
    limits = caps_by_kind(new.limits)
    for kind, cap in limits.items():
        highest = MAX_CAP if kind.meter is Meter.STOCK else MAX_RATE
        if not 0 <= cap <= highest:
            raise BadRequest(f"'limits.{kind}' must be a number from 0 to {highest}.", param="limits")
    policy = await session.get(KeyPolicy, tenant.id)
    if policy is None:
        policy = KeyPolicy(tenant_id=tenant.id)
        session.add(policy)
    policy.makes_keys, policy.max_keys, policy.max_days = new.makes_keys, new.max_keys, new.max_days
    policy.allowed_models = check_models(new.allowed_models, "allowed_models")
    policy.limits = {kind.value: cap for kind, cap in limits.items()}
    await session.flush()
    return policy


async def delete_policy(session: AsyncSession, tenant_id: str) -> KeyPolicyView:
    """Delete the policy of a tenant; return its last state. Raises NotFound."""
    policy = await get_policy(session, tenant_id)
    view = KeyPolicyView.of(policy)
    await session.delete(policy)
    await session.flush()
    return view
