"""Command `moiety requests`: search in the log of all requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import ObjectNames
from moiety_platform.cli.tables import show_csv, show_json
from moiety_platform.cli.usage_options import ReportOptions
from moiety_platform.prices.token_cost import dollars
from moiety_platform.resources.paths import path_of

PAGE = 500
COLUMNS = {
    "started_at": "started",
    "tenant": "tenant",
    "key": "key",
    "model": "model",
    "route": "route",
    "service_class": "class",
    "outcome": "outcome",
    "http_status": "status",
    "error_code": "error",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "cost": "$",
    "ttft_ms": "TTFT ms",
    "duration_ms": "duration ms",
    "slo_attained": "SLO attained",
    "end_user": "end user",
    "tags": "tags",
    "endpoint": "endpoint",
    "has_trace": "trace",
    "request_id": "request",
}
DETAILS = (
    "endpoint", "tags", "end_user", "route", "key", "duration_ms", "service_class", "prompt_tokens", "slo_attained",
    "has_trace", "cost", "ttft_ms", "output_tokens", "outcome", "model",
)  # fmt: skip

RequestId = Annotated[str, typer.Argument(help="Id of the request, as its answer has it.")]

app = typer.Typer(help="Search in the log of all requests, newest first; show one.")


@app.callback(invoke_without_command=True)
@admin_command
def requests(
    admin: Admin,
    context: typer.Context,
    *,
    scope: ReportOptions,
    model: Annotated[str | None, typer.Option(help="Name of the model that answered.")] = None,
    route: Annotated[str | None, typer.Option(help="Name of the route that the client requested.")] = None,
    service_class: Annotated[str | None, typer.Option("--class", help="Name of the served class.")] = None,
    outcome: Annotated[
        str | None,
        typer.Option(help="Outcome: stop, length, content_filter, disconnected, failed or rejected."),
    ] = None,
    status: Annotated[str | None, typer.Option(help="HTTP status such as 429, or a class of them such as 4xx.")] = None,
    error: Annotated[str | None, typer.Option(help="Error code, such as quota_exceeded.")] = None,
    slo: Annotated[str | None, typer.Option(help="Whether the SLO was met: attained, missed or none.")] = None,
    min_ms: Annotated[float | None, typer.Option(min=0, help="Least duration, in milliseconds.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Number of newest requests to show.")] = 50,
) -> None:
    """Search in the log of all requests; without options, the newest of the last 24 hours."""
    if context.invoked_subcommand is not None:
        return
    wanted = {
        **scope.query_of(admin),
        "model": model,
        "route": route,
        "service_class": service_class,
        "outcome": outcome,
        "status": status,
        "error_code": error,
        "slo": slo,
        "min_ms": min_ms,
    }
    found = newest(admin, last, wanted)
    if scope.as_csv:
        show_csv([in_cells(one) for one in found])
    elif admin.as_json:
        show_json({"data": found})
    else:
        names = ObjectNames(admin.client) if found else None
        admin.show_rows([in_names(one, names) for one in found], COLUMNS, DETAILS)


@app.command("show")
@admin_command
def show(admin: Admin, request_id: RequestId) -> None:
    """Show one request, whatever its time."""
    found = admin.client.get(path_of("requests", request_id))
    admin.show_row(found if admin.as_json else in_cells(found))


@app.command("content")
@admin_command
def content(admin: Admin, request_id: RequestId) -> None:
    """Show the text of a request and of its answers, as an administrator of a tenant that opted in."""
    found = admin.client.get(path_of("request-contents", request_id))
    admin.show_row(found if admin.as_json else {**found, "outputs": "\n".join(found["outputs"])})


@app.command("log-content")
@admin_command
def log_content(
    admin: Admin,
    tenant: Annotated[str, typer.Argument(help="Name or id of the tenant.")],
    keep_days: Annotated[int | None, typer.Option(min=1, max=90, help="Days for which contents are kept.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Opt out, and delete the contents that are stored.")] = False,
) -> None:
    """Opt a tenant in to the logging of contents, or out; without an option, show whether it has opted in."""
    if off and keep_days is not None:
        raise typer.BadParameter("give --keep-days or --off, not both")
    path = path_of("request-contents", "logging", admin.client.find_tenant(tenant)["id"])
    if off:
        admin.show_row(admin.client.call("DELETE", path))
    elif keep_days is not None:
        admin.show_row(admin.client.call("PUT", path, {"keep_days": keep_days}))
    else:
        admin.show_row(admin.client.get(path))


def newest(admin: Admin, number: int, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return this number of the newest requests, fewer if there are fewer."""
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None and len(found) < number:
        limit = min(PAGE, number - len(found))
        page = admin.client.get("/requests", limit=limit, cursor=cursor or None, **wanted)
        found += page["data"]
        cursor = page["next_cursor"]
    return found


def in_cells(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with its cost in dollars, and with its tags in one line."""
    cells = {**request, "tags": ", ".join(f"{name}={value}" for name, value in request["tags"].items())}
    return {**cells, "cost": dollars(request["cost_nanodollars"])}


def in_names(request: Mapping[str, Any], names: ObjectNames | None) -> dict[str, Any]:
    """Return a request for a table, with the names of its tenant and key."""
    cells = in_cells(request)
    if names is not None:
        cells |= {"tenant": names.tenant(request["tenant_id"]), "key": names.key(request["key_id"])}
    return cells
