"""Request and response bodies of the admin API for tenants and projects."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec

from moiety_platform.classes.checks import CLASS_NAME
from moiety_platform.db.paging import Page
from moiety_platform.etags import Tagged
from moiety_platform.openapi.schemas import shows
from moiety_platform.tenants.checks import NAME, WEIGHT
from moiety_platform.tenants.models import Project, SpeculativePrefillMode, Tenant, TenantStatus
from moiety_wire.classes import STANDARD
from moiety_wire.shared_fields import CopyOf

STATUS = shows(enum=list(TenantStatus))
SPECULATIVE_PREFILL = shows(enum=list(SpeculativePrefillMode))


class NewTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant to create."""

    name: Annotated[str, NAME]
    service_class: Annotated[str, CLASS_NAME] = STANDARD.name
    weight: Annotated[float, WEIGHT] = 1.0
    speculative_prefill: Annotated[str, SPECULATIVE_PREFILL] = SpeculativePrefillMode.OFF.value


class TenantChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a tenant; fields that are not given stay unchanged."""

    name: Annotated[str, NAME] | msgspec.UnsetType = msgspec.UNSET
    service_class: Annotated[str, CLASS_NAME] | msgspec.UnsetType = msgspec.UNSET
    weight: Annotated[float, WEIGHT] | msgspec.UnsetType = msgspec.UNSET
    status: Annotated[str, STATUS] | msgspec.UnsetType = msgspec.UNSET
    speculative_prefill: Annotated[str, SPECULATIVE_PREFILL] | msgspec.UnsetType = msgspec.UNSET


class NewProject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A project to create."""

    tenant_id: str
    name: Annotated[str, NAME]


class TenantView(CopyOf[Tenant], Tagged, frozen=True):
    """A tenant as the API shows it."""

    id: str
    name: str
    service_class: str
    weight: float
    status: str
    created_at: datetime
    speculative_prefill: str


class TenantPage(Page[TenantView], frozen=True):
    """A page of tenants, oldest first; `next_cursor` is null on the last page."""


class ProjectView(CopyOf[Project], Tagged, frozen=True):
    """A project as the API shows it."""

    id: str
    tenant_id: str
    name: str
    created_at: datetime


class ProjectPage(Page[ProjectView], frozen=True):
    """A page of projects, oldest first; `next_cursor` is null on the last page."""
