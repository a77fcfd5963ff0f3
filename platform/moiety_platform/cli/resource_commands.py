"""Commands of an administered resource, made from its declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.lazy import load_target
from moiety_platform.cli.object_names import (
    FINDERS,
    TENANT_FINDERS,
    ObjectNames,
    require_tenant_of_name,
    warn_of_unknown_models,
)
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.tables import show_json
from moiety_platform.resources.commands import OWNER_TENANT, Command, Output, Parameter, ParameterLocation
from moiety_platform.resources.declaration import Resource
from moiety_platform.resources.paths import path_of

TENANT = "tenant"  # column of the name of the tenant with the id `tenant_id`
Values = dict[ParameterLocation, dict[str, Any]]


def app_of(resource: Resource) -> typer.Typer:
    """Return the group of the resource's commands."""
    app = typer.Typer(no_args_is_help=True, help=resource.help)
    for one in resource.commands:
        function = command_of(resource, one) if isinstance(one, Command) else load_target(one.target)
        app.command(one.name)(function)
    return app


def command_of(resource: Resource, command: Command) -> Callable[..., None]:
    """Return a declared command as a function with typer's signature."""

    def run(admin: Admin, /, **given: Any) -> None:
        _run(resource, command, admin, given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    annotations = {one.name: _annotation(one) for one in command.parameters}
    parameters = [
        inspect.Parameter(one.name, keyword, default=inspect.Parameter.empty if one.is_required else None)
        for one in command.parameters
    ]
    admin = inspect.Parameter("admin", inspect.Parameter.POSITIONAL_ONLY)
    run.__signature__ = inspect.Signature([admin, *parameters])  # type: ignore[attr-defined]
    run.__annotations__ = annotations
    run.__name__, run.__doc__ = f"{command.name}_{resource.name}", command.help
    return admin_command(run)


def _annotation(parameter: Parameter) -> Any:
    flags = (parameter.flag,) if parameter.flag else ()
    shown = (
        typer.Argument(help=parameter.help)
        if parameter.is_argument
        else typer.Option(*flags, help=parameter.help, min=parameter.minimum)
    )
    return Annotated[parameter.type if parameter.is_required else parameter.type | None, shown]


def _run(resource: Resource, command: Command, admin: Admin, given: Mapping[str, Any]) -> None:
    values = _parsed(command, given)
    if command.lacks and not values[ParameterLocation.BODY]:
        raise typer.BadParameter(command.lacks)
    found = _find_objects(command, admin.client, values)
    if found is not None and command.method == "GET" and values[ParameterLocation.PATH]:
        admin.show_row(found)  # it has been read already
        return
    warn_of_unknown_models(admin.client, _models_in(command, values))
    takes_body = command.constants or any(one.place is ParameterLocation.BODY for one in command.parameters)
    body = {**values[ParameterLocation.BODY], **command.constants} if takes_body else None
    suffix = (command.suffix,) if command.suffix else ()
    path = path_of(resource.collection, *values[ParameterLocation.PATH].values(), *suffix)
    if command.output is Output.PAGES:
        _show_rows(resource, admin, list(admin.client.pages(path, **values[ParameterLocation.QUERY])))
        return
    response = admin.client.call(command.method, path, body, **values[ParameterLocation.QUERY])
    if command.output is Output.ROWS:
        _show_rows(resource, admin, response["data"])
    elif command.output is Output.SECRET:
        show_secret(admin, response, command.notice)
    else:
        plain = resource.plain
        admin.show_row(response if admin.as_json or plain is None else plain(response))


def _parsed(command: Command, given: Mapping[str, Any]) -> Values:
    """Return the given values by their places and fields. Raises typer.BadParameter."""
    values: Values = {place: {} for place in ParameterLocation}
    for one in command.parameters:
        value = given[one.name]
        if value is None:
            continue
        if one.parse is not None:
            try:
                value = one.parse(value)
            except ValueError as exc:
                raise typer.BadParameter(f"{one.option} {exc}") from exc
        values[one.place][one.field or one.name] = value
    return values


def _models_in(command: Command, values: Values) -> list[str]:
    """Return the models that the values name."""
    named: list[str] = []
    for one in command.parameters:
        field = one.field or one.name
        if one.models_of is not None and field in values[one.place]:
            named += one.models_of(values[one.place][field])
    return named


def _find_objects(command: Command, client: AdminClient, values: Values) -> dict[str, Any] | None:
    """Replace the names of objects by their ids; return the last object, None where no name was given."""
    found = None
    for one in command.parameters:
        field = one.field or one.name
        if one.finds and field in values[one.place]:
            find = _find_of_tenant if OWNER_TENANT in command.parameters else _find
            found = find(one, client, values)
            values[one.place][field] = found["id"]
    return found


def _find(parameter: Parameter, client: AdminClient, values: Values) -> dict[str, Any]:
    return FINDERS[parameter.finds](client, values[parameter.place][parameter.field or parameter.name])


def _find_of_tenant(parameter: Parameter, client: AdminClient, values: Values) -> dict[str, Any]:
    """Return the object of the tenant that the command names. Raises CommandError where it has to name one."""
    if parameter.finds not in TENANT_FINDERS:
        return _find(parameter, client, values)
    text = values[parameter.place][parameter.field or parameter.name]
    tenant_id = values[OWNER_TENANT.place].get(OWNER_TENANT.name)
    found = TENANT_FINDERS[parameter.finds](client, text, tenant_id=tenant_id)
    if tenant_id is None:
        require_tenant_of_name(client, text, found)
    return found


def _show_rows(resource: Resource, admin: Admin, rows: list[dict[str, Any]]) -> None:
    plain = resource.plain
    if TENANT in resource.columns and not admin.as_json:
        names = ObjectNames(admin.client)
        rows = [{**row, TENANT: names.tenant_of_row(row)} for row in rows]
    shown = rows if admin.as_json or plain is None else [plain(row) for row in rows]
    admin.show_rows(shown, resource.columns, resource.details, resource.prose)


def show_secret(admin: Admin, response: dict[str, Any], notice: str) -> None:
    """Show a secret alone on standard output, and the notice on standard error."""
    if admin.as_json:
        show_json(response)
        return
    print_line(response["secret"])
    print_line(notice.format_map(response), err=True)
