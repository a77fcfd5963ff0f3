"""Options that select the requests of a report: whose they are, and how their sums are grouped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_command import Admin
from moiety_platform.cli.object_names import find_key, find_project
from moiety_platform.cli.printing import print_prose
from moiety_platform.cli.tables import show_csv, show_json
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


def find_tenant_id(admin: Admin, tenant: str | None) -> str | None:
    """Return the id of the tenant with this name or id; None for None."""
    return None if tenant is None else str(admin.client.find_tenant(tenant)["id"])


@dataclass(frozen=True)
class ReportFilter(ReportPeriod):
    """Options of the period of a report, and of whose requests it is."""

    tenant: TenantFilter = None
    project: ProjectFilter = None
    key: KeyFilter = None
    end_user: EndUserFilter = None
    tag: TagFilter = None

    def query_of(self, admin: Admin) -> dict[str, Any]:
        """Return the query parameters of the report. Raises typer.BadParameter."""
        tenant_id = find_tenant_id(admin, self.tenant)
        return {
            **self.query(),
            "tenant_id": tenant_id,
            "project_id": None if self.project is None else find_project(admin.client, self.project)["id"],
            "key_id": None if self.key is None else find_key(admin.client, self.key, tenant_id=tenant_id)["id"],
            "end_user": self.end_user,
            "tag": self.tag,
        }


@dataclass(frozen=True)
class ReportOptions(ReportFilter):
    """Options of the requests of a report, and of its format."""

    as_csv: CsvOption = False

    def query_of(self, admin: Admin) -> dict[str, Any]:
        """Return the query parameters of the report. Raises typer.BadParameter, also if it is to be CSV and JSON."""
        if self.as_csv and admin.as_json:
            raise typer.BadParameter("give --csv or --json, not both")
        return super().query_of(admin)

    def print_data(self, admin: Admin, report: Mapping[str, Any], by: str) -> bool:
        """Print the sums of a report as JSON or CSV, and return True, if it is to be one of these.

        Warn on the error output if the report does not list all of its groups, of `by`.
        """
        if admin.as_json:
            show_json(report)
            return True
        if report["truncated"]:
            _warn_of_more_groups(report, by)
        if self.as_csv:
            show_csv([{**one["group"], **one["totals"]} for one in report["data"]])
        return self.as_csv


def _warn_of_more_groups(report: Mapping[str, Any], by: str) -> None:
    """Say on the error output that a report has more groups than it lists."""
    named = [one.strip() for one in by.split(",")]
    first = "first ones" if "hour" in named or "day" in named else "ones with the most output tokens"
    print_prose(
        f"there are more groups; only the {len(report['data']):,} {first} are listed. Ask for a shorter time, or "
        "filter, for example by --tenant."
    )
