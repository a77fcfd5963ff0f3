"""Roles of administrators by the groups of their identity provider. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moiety_platform.access.roles import Role, tenant_complaint

FORM = "such as platform-admins=owner,acme-leads=tenant-admin:acme"


@dataclass(frozen=True, slots=True)
class GroupRole:
    """Role of a group's members. `tenant` is the id or name of its tenant, None for the whole deployment."""

    role: Role
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class HeldRole:
    """Role of a token, with the id of its tenant."""

    role: Role
    tenant_id: str | None = None


def parse_group_roles(text_by_group: Mapping[str, str]) -> dict[str, GroupRole]:
    """Return the roles by group, from texts such as `owner` or `tenant-admin:acme`. Raises ValueError."""
    parsed = {}
    for group, text in text_by_group.items():
        name, has_tenant, tenant = (part.strip() for part in text.partition(":"))
        role = Role.of(name)
        if role is None:
            message = (
                f"the group {group!r} must have one of the roles {', '.join(Role)}, not {text!r}; write roles {FORM}"
            )
            raise ValueError(message)
        if has_tenant and not tenant:
            raise ValueError(f"the group {group!r} names no tenant after {name!r}; write roles {FORM}")
        if complaint := tenant_complaint(role, tenant or None):
            raise ValueError(f"the group {group!r}: {complaint} Write roles {FORM}")
        parsed[group] = GroupRole(role, tenant or None)
    return parsed


def best_roles(held: Iterable[HeldRole], tenant_id: str | None) -> list[HeldRole]:
    """Return the roles with the most rights; several if they are the same role of different tenants.

    A role of the whole deployment comes before the same role of one tenant. With `tenant_id`, which the token itself
    names, roles of other tenants do not count, and others are restricted to it.
    """
    usable = {
        HeldRole(one.role, tenant_id or one.tenant_id)
        for one in held
        if tenant_id is None or one.tenant_id in (None, tenant_id)
    }
    for role in Role:
        of_role = sorted((one for one in usable if one.role is role), key=lambda one: one.tenant_id or "")
        if of_role:
            whole = [one for one in of_role if one.tenant_id is None and tenant_complaint(role, None) is None]
            return whole or [one for one in of_role if one.tenant_id is not None] or of_role
    return []
