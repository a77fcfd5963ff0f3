"""Command `moiety controller`: applies the custom resources of its namespace at a gateway, after each change."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Self

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.apply.application import ApplyTerms, apply_declared
from moiety_platform.cli.apply.plan import PlanAction
from moiety_platform.cli.controller.custom_objects import CustomObject, Ref, new_condition
from moiety_platform.cli.controller.custom_objects_api import CustomObjectsApi
from moiety_platform.cli.controller.declarations import declarations_of
from moiety_platform.cli.controller.withholding import keys_without_limits, withhold_steps
from moiety_platform.cli.errors import CommandError, NotAllowed
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
    it is applied, and otherwise why not. Objects are removed with their custom resource; limits and tenants only while
    all custom resources of the tenant can be applied.
    Runs until it is stopped.
    """
    try:
        identity = PodIdentity.of(os.environ, account)
        with CustomObjectsApi(identity) as api, _GatewayConnection(admin, admin_key_file) as gateway:
            gateway.connect()
            changed = threading.Event()
            api.watch(changed)
            terms = ApplyTerms(source=SOURCE, account=account, prune=True, adopt=adopt, partial=True)
            withheld: list[str] = []
            while True:
                changed.clear()
                is_done, before = False, withheld
                try:
                    is_done, withheld = _apply_once(gateway, api, terms)
                except ApiRefused as exc:
                    print_line(f"Error: {exc}", err=True)
                for line in withheld:
                    if line not in before:
                        print_line(line, err=True)
                changed.wait(resync_s if is_done else RETRY_S)
                time.sleep(SETTLE_S)
    except ClusterError as exc:
        raise CommandError(str(exc)) from exc


class _GatewayConnection:
    """Connection to the gateway with the administrator's key, which is read again after the gateway has refused it."""

    def __init__(self, admin: Admin, key_file: Path | None) -> None:
        self._admin, self._key_file = admin, key_file
        self._client: AdminClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def connect(self) -> AdminClient:
        """Return the connection, with the key of the file once there is one. Raises CommandError without a key."""
        if self._client is None:
            key = self._admin.admin_key if self._key_file is None else _wait_for_key(self._key_file)
            self._client = AdminClient.connect(self._admin.url, key, self._admin.data_dir)
        return self._client

    def disconnect(self) -> None:
        """Close the connection, and forget its key."""
        if self._client is not None:
            self._client.http.close()
            self._client = None


def _apply_once(gateway: _GatewayConnection, api: CustomObjectsApi, terms: ApplyTerms) -> tuple[bool, list[str]]:
    """Apply all custom resources, and write their conditions. Raises ApiRefused.

    Return False if something is to be tried again, and a line for each object that is not removed yet.
    """
    objects = api.read_all()
    made = declarations_of(objects)
    try:
        steps, outcome, _ = apply_declared(
            gateway.connect(), made.declared, replace(terms, review=partial(withhold_steps, made))
        )
    except CommandError as exc:
        if isinstance(exc, NotAllowed):
            gateway.disconnect()
        print_line(f"Error: {exc}", err=True)
        _write_conditions(api, objects, made.problems | {one.ref: str(exc) for one in objects})
        return False, []
    problems = dict(made.problems)
    for place, why in outcome.failed.items():
        owner = made.owners.get(place)
        if owner is None:
            print_line(f"Error: {place[0]} {place[1]}: {why}", err=True)  # an object that is to be deleted
        else:
            problems[owner] = _joined(problems.get(owner, ""), f"{place[0]} {place[1]}: {why}")
    for key, why in keys_without_limits(made, outcome.failed).items():
        if why not in problems.get(key, ""):
            problems[key] = _joined(problems.get(key, ""), why)
    _write_conditions(api, objects, problems)
    if outcome.done or problems:
        print_line(f"{len(steps)} objects, {outcome.done} changed, {len(problems)} custom resources not applied")
    withheld = [f"Not removed: {one.kind} {one.name}: {one.why}" for one in steps if one.action is PlanAction.LEFT]
    return not outcome.failed, withheld


def _wait_for_key(key_file: Path) -> str:
    """Return the key of the file, once there is one."""
    is_announced = False
    while not (key := key_file.read_text(encoding="utf-8").strip() if key_file.exists() else ""):
        if not is_announced:
            print_line(f"waiting for an administrator's key in {key_file}")
            is_announced = True
        time.sleep(KEY_POLL_S)
    return key


def _write_conditions(api: CustomObjectsApi, objects: list[CustomObject], problems: dict[Ref, str]) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for one in objects:
        condition = new_condition(one, problems.get(one.ref, ""), now)
        if condition is not None:
            api.set_condition(one, condition)


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if first else second
