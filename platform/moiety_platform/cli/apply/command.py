"""Command `moiety apply`: options, the plan as a table, the summary."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.apply.application import ApplyTerms, apply_declared
from moiety_platform.cli.apply.document import Document, FileError, read_document
from moiety_platform.cli.apply.execute import ApplyOutcome
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.apply.plan import IDLE, PlanAction, PlanStep
from moiety_platform.cli.apply.spec import read_declared_objects
from moiety_platform.cli.errors import CommandError, NotReachable
from moiety_platform.cli.gateway_client import answer
from moiety_platform.cli.object_names import warn_of_unknown_models
from moiety_platform.cli.printing import print_line, print_prose
from moiety_platform.cli.tables import show_json, show_rows, show_value
from moiety_platform.cluster.pod_identity import ACCOUNT
from moiety_platform.model_routes.admin_resource import models_of_targets
from moiety_platform.model_routes.declared import ROUTE
from moiety_platform.reloading.source import mark_of
from moiety_platform.resources.apply_kind import DeclaredObject

PAUSE_S = 0.5
PRINTED = Path("-")  # in the place of a file of secrets
POLL_INTERVAL_S = 1.0
POLLS_UNTIL_RETRY = 10  # after an error that the gateway reported
COLUMNS = {"does": "does", "kind": "what", "name": "name", "field": "field", "before": "is", "after": "becomes",
           "why": "why"}  # fmt: skip


@admin_command
def apply(
    admin: Admin,
    file: Annotated[
        Path,
        typer.Option(
            "--file", "-f", help="YAML file that declares the objects, such as tenants, service classes and quotas."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the changes without making them.")] = False,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Delete objects that earlier versions of the file declared and this one does not."
        ),
    ] = False,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="Manage existing objects of the same names that were created by other means."),
    ] = False,
    source: Annotated[
        str, typer.Option(help="Name of this set of declarations. Each file needs its own name.")
    ] = "default",
    show_keys: Annotated[
        bool, typer.Option("--show-keys", help="Print the text of new keys that have no keySecret.")
    ] = False,
    secrets_file: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for the texts of new keys and webhooks, outside a cluster: each under its keySecret, or "
            "kind and name. Its mode is 0600. With - the texts are printed."
        ),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Apply the other objects even if some are refused.")
    ] = False,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Longest time to wait until the gateway answers, in seconds.")
    ] = 0,
    watch: Annotated[bool, typer.Option("--watch", help="Keep running and apply each change of the file.")] = False,
    account: Annotated[
        Path, typer.Option(help="Folder with the token, namespace and certificate of the pod.", hidden=True)
    ] = ACCOUNT,
) -> None:
    """Make the objects of a gateway match a file. Objects that were created by other means are not changed.

    The whole plan is checked first, also by the gateway; if an object is refused, nothing is done, unless --partial is
    given. A second run changes nothing. Ends with 1 if an object was not applied. With --watch it continues until it is
    stopped; errors are reported, and retried when the file changes or the gateway is back.
    """
    options = ApplyOptions(
        file, source, account, wait_s, secrets_file, dry_run=dry_run, prune=prune, adopt=adopt,
        show_keys=show_keys or secrets_file == PRINTED, partial=partial,
    )  # fmt: skip

    def once() -> None:
        _apply_once(admin, options)

    if watch:
        follow(file, once)
    else:
        once()


def follow(file: Path, once: Callable[[], None]) -> None:
    """Call `once` now, and after each change of the file that lasts from one look to the next; endless."""
    taken = seen = mark_of([])
    polls_until_retry = -1  # -1: everything was done, or the file must change first
    while True:
        mark = mark_of([file])
        rests, seen = mark == seen, mark
        polls_until_retry -= polls_until_retry > 0
        if rests and (mark != taken or not polls_until_retry):
            taken, polls_until_retry = mark, -1
            try:
                once()
            except FileError as exc:
                print_line(f"Error: {exc}", err=True)
            except CommandError as exc:  # the file itself is valid
                print_line(f"Error: {exc}", err=True)
                polls_until_retry = 1 if isinstance(exc, NotReachable) else POLLS_UNTIL_RETRY
            sys.stdout.flush()
        time.sleep(POLL_INTERVAL_S)


@dataclass(frozen=True)
class ApplyOptions:
    """Options of one application of a file."""

    file: Path
    source: str
    account: Path
    wait_s: float
    secrets_file: Path | None
    dry_run: bool
    prune: bool
    adopt: bool
    show_keys: bool
    partial: bool


def _apply_once(admin: Admin, options: ApplyOptions) -> None:
    document = read_document(options.file)
    declared = with_secret_names(read_declared_objects(document), options.secrets_file)
    wait_for_gateway(admin.client.http, options.wait_s)
    warn_of_unknown_models(admin.client, declared_models(declared))
    file = None if options.secrets_file == PRINTED else options.secrets_file
    terms = ApplyTerms(
        source=options.source, account=options.account, secrets_file=file, dry_run=options.dry_run, prune=options.prune,
        adopt=options.adopt, show_keys=options.show_keys, partial=options.partial,
    )  # fmt: skip
    steps, outcome, refused = apply_declared(admin.client, declared, terms)
    if admin.as_json:
        show_json(_report(document, steps, outcome, dry_run=options.dry_run))
    else:
        _show(steps, outcome, dry_run=options.dry_run, wide=admin.wide)
    if outcome.failed:
        complaints = _complaints(document, steps, outcome)
        if refused and not (options.partial or options.dry_run):
            complaints.append("nothing was done; correct these objects, or apply the others with --partial")
        raise CommandError("\n".join(complaints))


def with_secret_names(declared: list[DeclaredObject], file: Path | None) -> list[DeclaredObject]:
    """Return the objects with the names of their texts in the file; without any where the texts are printed."""
    if file is None:
        return declared
    kinds = apply_kinds()
    return [
        replace(one, key_secret=None if file == PRINTED else one.key_secret or f"{one.kind} {one.name}")
        if kinds[one.kind].has_secret
        else one
        for one in declared
    ]


def declared_models(declared: list[DeclaredObject]) -> set[str]:
    """Return the models that prices, keys and routes of the file name."""
    named = {one.identity["model"] for one in declared if "model" in one.identity}
    for one in declared:
        named.update(one.fields.get("allowed_models") or ())
        if one.kind == ROUTE.kind:
            named.update(models_of_targets(one.fields["targets"]), one.fields.get("fallbacks") or ())
            named.update(one.fields[name] for name in ("downgrade_model", "shadow_model") if one.fields.get(name))
    return named


def wait_for_gateway(http: httpx.Client, wait_s: float) -> None:
    """Wait up to `wait_s` until the gateway answers; after that, the first call raises NotReachable."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        with contextlib.suppress(CommandError):
            answer(http, "GET", "/healthz")
            return
        time.sleep(PAUSE_S)


def _show(steps: list[PlanStep], outcome: ApplyOutcome, *, dry_run: bool, wide: bool) -> None:
    shown = [step for step in steps if step.action is not PlanAction.KEEP or step.why]
    if sys.stdout.isatty() and not wide:
        for step in shown:
            print_prose(_in_lines(step), err=False)
    elif shown:
        show_rows([row for step in shown for row in _rows(step)], COLUMNS, False, wide=wide)
    for (kind, name), text in outcome.texts.items():
        print_line(f"{kind} {name}: {text}   (store it now: it is not shown again)")
    counts = Counter(str(step.action) for step in steps)
    told = ", ".join(f"{count} {action}" for action, count in counts.items()) or "nothing is declared"
    print_line(
        f"{told}; " + ("nothing was done (--dry-run)" if dry_run else f"{outcome.done} done, {len(outcome.failed)} not")
    )


def _in_lines(step: PlanStep) -> str:
    """Return the action on an object as a line, and below it its changed fields and the reason."""
    lines = [f"{step.action} {step.kind} {step.name}"]
    for row in _rows(step):
        if row["field"]:
            change = row["after"] if step.action is PlanAction.CREATE else f"{row['before']} → {row['after']}"
            lines.append(f"    {row['field']}: {change}")
    return "\n".join([*lines, *([f"    {step.why}"] if step.why else [])])


def _rows(step: PlanStep) -> list[dict[str, Any]]:
    """Return one row per changed field; the names are only in the first."""
    head = {"does": str(step.action), "kind": step.kind, "name": step.name, "why": step.why}
    rows = [
        {
            "does": "",
            "kind": "",
            "name": "",
            "why": "",
            "field": field,
            "before": _shown(step, field, before),
            "after": _shown(step, field, after),
        }
        for field, (before, after) in step.changes.items()
        if not (step.action is PlanAction.CREATE and field == "name")
    ]
    if not rows:
        return [{**head, "field": "", "before": "", "after": ""}]
    return [{**rows[0], **head}, *rows[1:]]


def _shown(step: PlanStep, field: str, value: Any) -> str:
    """Return a value with all its digits; money in dollars."""
    shown = apply_kinds()[step.kind].show_value(step.declared, field, value)
    if shown is not None:
        return shown
    return f"{value:.6g}" if isinstance(value, float) else show_value(value)


def _report(document: Document, steps: list[PlanStep], outcome: ApplyOutcome, *, dry_run: bool) -> dict[str, Any]:
    shown = [
        {
            "action": str(step.action),
            "kind": step.kind,
            "name": step.name,
            "changes": {name: {"before": before, "after": after} for name, (before, after) in step.changes.items()},
            "why": step.why or None,
        }
        for step in steps
    ]
    return {
        "steps": shown,
        "to_do": sum(step.action not in IDLE for step in steps),
        "done": outcome.done,
        "dry_run": dry_run,
        "failed": _complaints(document, steps, outcome),
        "keys": {f"{kind} {name}": text for (kind, name), text in outcome.texts.items()},
    }


def _complaints(document: Document, steps: list[PlanStep], outcome: ApplyOutcome) -> list[str]:
    """Return the complaints, each with file and line, if the file has the object."""
    by_place = {(step.kind, step.name): step for step in steps}
    told = []
    for place, why in outcome.failed.items():
        one = by_place[place].declared
        where = f"{document.path}: " if one is None else f"{document.path}:{document.line(one.path)}: "
        told.append(f"{where}{place[0]} {place[1]}: {why}")
    return told
