"""Options that select the requests of a report: whose they are, and how their sums are grouped."""

from __future__ import annotations

from typing import Annotated

import typer

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
