"""The catalog of administered resources agrees with their routes, schemas and documents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute
from tests.tenancy.admin_api_access import real_app

from moiety_platform.access.views import VIEW_ACTIONS
from moiety_platform.administration.catalog import ACTIONS, RESOURCES
from moiety_platform.administration.documentation import action_table, resource_table
from moiety_platform.administration.router import ADMIN_PATH
from moiety_platform.auth.guard import action_of
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.lazy import load_target
from moiety_platform.clock import ManualClock
from moiety_platform.db.base import Base, DeploymentTable, SharedTable
from moiety_platform.db.session import Database
from moiety_platform.declarative_config.models import DeclaredKind
from moiety_platform.known_parameters import query_names
from moiety_platform.openapi.documents import DocumentPart, make_document
from moiety_platform.resources.commands import Command, CustomCommand, ParameterLocation
from moiety_platform.resources.declaration import Resource
from moiety_platform.settings import GatewaySettings

DOCS = Path(__file__).parents[2] / "docs"
DECLARED = [(resource, one) for resource in RESOURCES for one in resource.commands if isinstance(one, Command)]
BESIDES = {
    "belongs_to",
    "change",
    "last_used_at",
    "limits",
    "name",
    "owner",
    "spend",
    "tenant",
}  # columns that a command computes


@pytest.fixture
async def app(database: Database, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Litestar]:
    async with real_app(database, clock, tmp_path) as opened:
        yield opened


def admin_routes(app: Litestar) -> Iterator[tuple[str, str, HTTPRouteHandler]]:
    """Yield method, path below the admin API and handler of every route."""
    for route in app.routes:
        if isinstance(route, HTTPRoute) and route.path.startswith(ADMIN_PATH):
            for method, (handler, _) in route.route_handler_map.items():
                if method != "OPTIONS":
                    yield method, route.path_format.removeprefix(ADMIN_PATH), handler


def resource_of(path: str) -> Resource | None:
    return next((one for one in RESOURCES if path.split("/")[1] == one.collection), None)


def handler_of(app: Litestar, resource: Resource, command: Command) -> HTTPRouteHandler:
    """Return the route that a declared command asks."""
    in_path = sum(one.place is ParameterLocation.PATH for one in command.parameters)
    wanted = [resource.collection, *["{}"] * in_path, *([command.suffix] if command.suffix else [])]
    for method, path, handler in admin_routes(app):
        parts = ["{}" if part.startswith("{") else part for part in path.strip("/").split("/")]
        if (method, parts) == (command.method, wanted):
            return handler
    raise AssertionError(f"{resource.name} {command.name} asks for {command.method} {wanted}, which is not served")


def properties_of(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["$ref"].rpartition("/")[2]
    found: dict[str, Any] = document["components"]["schemas"][name]["properties"]
    return found


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
def test_the_routes_of_a_resource_read_and_change_by_its_actions_and_have_its_tag(app: Litestar) -> None:
    met = set()
    for method, path, handler in admin_routes(app):
        resource, action = resource_of(path), action_of(handler)
        assert action in ACTIONS, f"{method} {path}"
        met.add(action)
        if resource is None:
            assert action in VIEW_ACTIONS, f"{method} {path}"
            continue
        allowed: Sequence[Any] = [resource.read] if method == "GET" else [*resource.actions[1:], *VIEW_ACTIONS]
        assert action in allowed, f"{method} {path}"
        if action in resource.actions:
            assert list(handler.resolve_tags()) == [resource.collection], f"{method} {path}"
    asked_within = {action for resource in RESOURCES for action in resource.more}  # by the contents of a request
    assert set(ACTIONS) - met <= asked_within


def test_each_action_has_a_name_of_its_own() -> None:
    names = [action.name for action in ACTIONS]
    assert len(names) == len(set(names))
    of_tenants_alone = {action.name for action in ACTIONS if not action.anyone}
    contents = {"request_contents.read", "request_contents.configure"}
    own = {"self_service.read", "self_service.write_keys"}
    assert of_tenants_alone == contents | own, "the administrators of the deployment may do everything else"


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("resource", "command"), DECLARED, ids=lambda one: one.name)
def test_a_declared_command_sends_what_its_route_takes(app: Litestar, resource: Resource, command: Command) -> None:
    handler = handler_of(app, resource, command)
    sent = {
        place: {one.field or one.name for one in command.parameters if one.place is place}
        for place in ParameterLocation
    }
    assert sent[ParameterLocation.QUERY] <= query_names(handler)
    body = handler.parsed_fn_signature.parameters.get("data")
    fields = sent[ParameterLocation.BODY] | set(command.constants)
    if body is None:
        assert not fields
    else:
        types = [one for one in (body.annotation, *getattr(body.annotation, "__args__", ())) if one is not type(None)]
        assert fields <= set(next(one for one in types if hasattr(one, "__struct_fields__")).__struct_fields__)


@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
@pytest.mark.parametrize("resource", [one for one in RESOURCES if one.columns], ids=lambda one: one.name)
def test_the_columns_of_a_table_are_fields_that_the_list_answers(app: Litestar, resource: Resource) -> None:
    document = make_document(app, DocumentPart.ADMIN, GatewaySettings())
    answer = document["paths"][f"{ADMIN_PATH}{resource.path}"]["get"]["responses"]["200"]
    rows = properties_of(document, answer["content"]["application/json"]["schema"])["data"]["items"]
    assert set(resource.columns) - BESIDES <= set(properties_of(document, rows))


def test_the_commands_that_send_more_than_one_request_exist() -> None:
    custom = [one for resource in RESOURCES for one in resource.commands if isinstance(one, CustomCommand)]
    assert custom
    assert all(callable(load_target(one.target)) for one in custom)


def test_the_ledger_takes_the_kinds_that_files_declare() -> None:
    assert set(apply_kinds()) == set(DeclaredKind)


def test_parts_that_kinds_have_in_others_are_those_of_kinds_created_before() -> None:
    order = list(apply_kinds())
    for kind in apply_kinds().values():
        assert all(order.index(outer) < order.index(kind.kind) for outer in kind.within)


@pytest.mark.parametrize("table", [resource_table, action_table])
def test_the_page_of_administration_has_the_tables_of_the_catalog(table: Any) -> None:
    page = (DOCS / "administration.md").read_text(encoding="utf-8")
    assert table() in page, f"replace the table by:\n{table()}"


def test_the_page_of_commands_has_the_commands_of_each_resource() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    for resource in RESOURCES:
        if resource.commands:
            first, *others = (one.name for one in resource.commands)
            assert f"| {' · '.join([f'`moiety {resource.name} {first}`', *(f'`{one}`' for one in others)])} |" in page


def test_a_table_is_shared_or_of_the_deployment_or_of_tenants() -> None:
    tables = [mapper.class_ for mapper in Base.registry.mappers]
    assert not [table for table in tables if issubclass(table, SharedTable) and issubclass(table, DeploymentTable)]
    assert not [table for table in tables if issubclass(table, SharedTable) and hasattr(table, "of_tenant")]
