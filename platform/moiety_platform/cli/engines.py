"""Commands `moiety engines …`: list engines, let them sleep or wake, and change their number of expert ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.top.reading import state_of
from moiety_platform.resources.paths import path_of

COLUMNS = {
    "id": "id",
    "model": "model",
    "address": "address",
    "state": "state",
    "role": "role",
    "running": "running",
    "waiting": "waiting",
    "expert_ranks": "expert ranks",
    "requested_expert_ranks": "requested",
    "reason": "reason",
}
DETAILS = ("address", "role")
PROSE = ("reason",)
POLL_S = 0.5
REFUSED_AFTER_S = 5.0  # a refusal of before may be in the loads for this time

app = typer.Typer(no_args_is_help=True, help="List engines, let them sleep or wake, and change their expert ranks.")

EngineId = Annotated[str, typer.Argument(help="Id of the engine, as moiety engines list shows it.")]


@app.command("list")
@admin_command
def list_engines(admin: Admin) -> None:
    """List the engines of the gateway, with their states."""
    found = admin.client.get("/engines")["data"]
    admin.show_rows(found if admin.as_json else [row_of(one) for one in found], COLUMNS, DETAILS, PROSE)


@app.command("sleep")
@admin_command
def sleep_engine(admin: Admin, engine_id: EngineId) -> None:
    """Let an engine free its device's memory once its open requests have ended."""
    _show(admin, admin.client.call("POST", path_of("engines", engine_id, "sleep")))


@app.command("wake")
@admin_command
def wake_engine(admin: Admin, engine_id: EngineId) -> None:
    """Let a sleeping engine load its weights again."""
    _show(admin, admin.client.call("POST", path_of("engines", engine_id, "wake")))


@app.command("expert-ranks")
@admin_command
def scale_expert_ranks(
    admin: Admin,
    engine_id: EngineId,
    num_ranks: Annotated[int, typer.Argument(min=0, help="Number of ranks that are to hold experts only.")],
    wait_s: Annotated[
        float, typer.Option(min=0, help="Longest wait for the end of the change, in seconds; 0 does not wait.")
    ] = 300.0,
) -> None:
    """Change the number of ranks that hold experts only (--ffn-ranks), while the engine serves.

    Ends with 1 if the engine could not change it, or has not within the time.
    """
    path = path_of("engines", engine_id, "expert-ranks")
    shown = admin.client.call("POST", path, {"num_ranks": num_ranks})
    if wait_s:
        shown = _wait_for_ranks(admin.client, engine_id, num_ranks, wait_s)
    _show(admin, shown)


def _wait_for_ranks(client: AdminClient, engine_id: str, num_ranks: int, wait_s: float) -> dict[str, Any]:
    """Return the engine once it has this number of expert ranks. Raises CommandError with the reason if it has not."""
    begin_s = time.monotonic()
    while True:
        engine = _engine(client, engine_id)
        load = engine["load"] or {}
        if load.get("expert_ranks") == load.get("requested_expert_ranks") == num_ranks:
            return engine
        waited_s, problem = time.monotonic() - begin_s, load.get("expert_ranks_problem")
        is_over = load.get("requested_expert_ranks") == load.get("expert_ranks")
        if problem and is_over and waited_s > min(REFUSED_AFTER_S, wait_s):
            raise CommandError(f"engine {engine_id} keeps {load['expert_ranks']} expert ranks: {problem}")
        if waited_s > wait_s:
            raise CommandError(
                f"engine {engine_id} has {load.get('expert_ranks', 'an unknown number of')} expert ranks after "
                f"{wait_s:g} s, and not {num_ranks}; it may still be changing: see moiety engines list"
            )
        time.sleep(POLL_S)


def _engine(client: AdminClient, engine_id: str) -> dict[str, Any]:
    """Return an engine by its id. Raises CommandError if the gateway has none with it."""
    for one in client.get("/engines")["data"]:
        if one["card"] is not None and one["card"]["engine_id"] == engine_id:
            found: dict[str, Any] = one
            return found
    raise CommandError(f"the gateway has lost engine {engine_id}: see moiety engines list")


def _show(admin: Admin, engine: Mapping[str, Any]) -> None:
    admin.show_row(engine if admin.as_json else row_of(engine))


def row_of(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine of the admin API as a row of the table. Without expert ranks, these fields are empty."""
    load, card = engine["load"] or {}, engine["card"] or {}
    has_ranks = bool(load.get("expert_ranks") or load.get("requested_expert_ranks"))
    return {
        "id": card.get("engine_id"),
        "model": card.get("model"),
        "address": engine["address"],
        "state": state_of(engine),
        "role": card.get("role"),
        "running": load.get("num_running"),
        "waiting": load.get("num_waiting"),
        "expert_ranks": load["expert_ranks"] if has_ranks else None,
        "requested_expert_ranks": load["requested_expert_ranks"] if has_ranks else None,
        "reason": engine["reason"] or load.get("expert_ranks_problem") or load.get("sleep_problem") or "",
    }
