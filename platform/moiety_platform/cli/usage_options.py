"""Options that select the requests of a report: whose they are, and how their sums are grouped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_command import Admin
from moiety_platform.cli.object_names import find_key, find_project
from moiety_platform.cli.printing import print_prose
from moiety_platform.cli.time_options import ReportPeriod

Grouping = Annotated[
    str,
    typer.Option(
        help="Columns to group by, separated by commas: tenant, project, key, model, service_class, hour, day, "
        "end_user and tag:NAME."
    ),
]
TenantFilter = Annotated[str | None, typer.Option(help="Name or id of a tenant. If not given, all tenants.")]
ProjectFilter = Annotated[
    str | None, typer.Option(help="Id or name of a project, or TENANT/NAME. If not given, all projects.")
]
KeyFilter = Annotated[str | None, typer.Option(help="Id of a key, or name of an active key. If not given, all keys.")]
ModelFilter = Annotated[str | None, typer.Option(help="Name of a model. If not given, all models.")]
EndUserFilter = Annotated[str | None, typer.Option(help="End user that the requests name. If not given, all.")]
TagFilter = Annotated[
    str | None, typer.Option(help="Tag of the requests, such as team=search. If not given, all requests.")
]
CsvOption = Annotated[bool, typer.Option("--csv", help="Print CSV with all fields instead of a table.")]


def check_format(admin: Admin, *, as_csv: bool) -> None:
    """Raise typer.BadParameter if the report is to be CSV and JSON."""
    if as_csv and admin.as_json:
        raise typer.BadParameter("give --csv or --json, not both")


def warn_of_more_groups(report: Mapping[str, Any], by: str) -> None:
    """Say on the error output that a report has more groups than it lists."""
    if report["truncated"]:
        named = [one.strip() for one in by.split(",")]
        first = "first ones" if "hour" in named or "day" in named else "ones with the most output tokens"
        print_prose(
            f"there are more groups; only the {len(report['data']):,} {first} are listed. Ask for a shorter time, or "
            "filter, for example by --tenant."
        )


def find_tenant_id(admin: Admin, tenant: str | None) -> str | None:
    """Return the id of the tenant with this name or id; None for None."""
    return None if tenant is None else str(admin.client.find_tenant(tenant)["id"])


@dataclass(frozen=True)
class ReportFilter(ReportPeriod):
    """Options of the period of a report, and of the tenant, project and key that its requests belong to."""

    tenant: TenantFilter = None
    project: ProjectFilter = None
    key: KeyFilter = None

    def query_of(self, admin: Admin) -> dict[str, Any]:
        """Return the query parameters of the report. Raises typer.BadParameter."""
        tenant_id = find_tenant_id(admin, self.tenant)
        return {
            **self.query(),
            "tenant_id": tenant_id,
            "project_id": None if self.project is None else find_project(admin.client, self.project)["id"],
            "key_id": None if self.key is None else find_key(admin.client, self.key, tenant_id=tenant_id)["id"],
        }
