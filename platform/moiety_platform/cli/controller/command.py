"""Command `moiety controller`: applies the custom resources of its namespace at a gateway, after each change."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.apply.application import ApplyTerms, apply_declared
from moiety_platform.cli.controller.custom_objects import CustomObject, Ref, declarations_of, new_condition
from moiety_platform.cli.controller.custom_objects_api import CustomObjectsApi
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.printing import print_line
from moiety_platform.cluster.errors import ApiRefused, ClusterError
from moiety_platform.cluster.pod_identity import ACCOUNT, PodIdentity

SOURCE = "kubernetes"
SETTLE_S = 0.2  # several objects are often changed at once
RETRY_S = 5.0
KEY_POLL_S = 1.0


@admin_command
def controller(
    admin: Admin,
    resync_s: Annotated[
        float, typer.Option(min=1, help="Interval at which all objects are applied even without a change, in seconds.")
    ] = 300.0,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Manage existing objects of the same names that were created by other means."),
    ] = False,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the administrator's key, in place of --admin-key; it is waited for.", dir_okay=False
        ),
    ] = None,
    account: Annotated[
        Path, typer.Option(help="Folder with the token, namespace and certificate of the pod.", hidden=True)
    ] = ACCOUNT,
) -> None:
    """Apply the Tenants, ApiKeys and Limits of this pod's namespace to a gateway, as `moiety apply` does.

    Texts of new keys are stored in the Secrets that the ApiKeys name. The condition Ready of each object says whether
    it is applied, and otherwise why not. Objects are deleted with their custom resource, unless another one is invalid.
    Runs until it is stopped.
    """
    try:
        identity = PodIdentity.of(os.environ, account)
        with CustomObjectsApi(identity) as api:
            client = admin.client if admin_key_file is None else _client_of(admin, admin_key_file)
            changed = threading.Event()
            api.watch(changed)
            while True:
                changed.clear()
                is_done = _apply_once(client, api, account, adopt=adopt)
                changed.wait(resync_s if is_done else RETRY_S)
                time.sleep(SETTLE_S)
    except ClusterError as exc:
        raise CommandError(str(exc)) from exc


def _apply_once(client: AdminClient, api: CustomObjectsApi, account: Path, *, adopt: bool) -> bool:
    """Apply all custom resources, and write their conditions. Return False if something is to be tried again."""
    try:
        objects = api.read_all()
        made = declarations_of(objects)
        problems = dict(made.problems)
        terms = ApplyTerms(source=SOURCE, account=account, prune=not made.problems, adopt=adopt, partial=True)
        try:
            steps, outcome, _ = apply_declared(client, made.declared, terms)
        except CommandError as exc:
            print_line(f"Error: {exc}", err=True)
            _write_conditions(api, objects, problems | {one.ref: str(exc) for one in objects})
            return False
        for place, why in outcome.failed.items():
            owner = made.owners.get(place)
            if owner is None:
                print_line(f"Error: {place[0]} {place[1]}: {why}", err=True)  # an object that is to be deleted
            else:
                problems[owner] = _joined(problems.get(owner, ""), f"{place[0]} {place[1]}: {why}")
        _write_conditions(api, objects, problems)
        if outcome.done or problems:
            print_line(f"{len(steps)} objects, {outcome.done} changed, {len(problems)} custom resources not applied")
    except ApiRefused as exc:
        print_line(f"Error: {exc}", err=True)
        return False
    return not outcome.failed


def _client_of(admin: Admin, key_file: Path) -> AdminClient:
    """Return a client with the key of the file, once there is one."""
    is_told = False
    while not (key := key_file.read_text(encoding="utf-8").strip() if key_file.exists() else ""):
        if not is_told:
            print_line(f"waiting for an administrator's key in {key_file}")
            is_told = True
        time.sleep(KEY_POLL_S)
    return AdminClient.connect(admin.url, key, admin.data_dir)


def _write_conditions(api: CustomObjectsApi, objects: list[CustomObject], problems: dict[Ref, str]) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for one in objects:
        condition = new_condition(one, problems.get(one.ref, ""), now)
        if condition is not None:
            api.set_condition(one, condition)


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second
