"""Check of a plan by the gateway before anything is done: each new or changed object is sent as a dry run.

A dry run is the request itself, which the gateway validates in a transaction that it then rolls back. An object that
refers to a class or project of the same plan is not checked, since the gateway does not know it yet. A limit or a key
of a new object is checked as if it were one of an existing object of that kind.
"""

from __future__ import annotations

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.current import Current
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.apply.plan import IDLE, PlanAction, PlanStep
from moiety_platform.cli.errors import CommandError, Refused
from moiety_platform.resources.apply_kind import AdminRequest, DeclaredObject, ObjectPlace

DRY_RUN = {"X-Moiety-Dry-Run": "true"}
WITHOUT_NAMES = ("limit", "key")  # kinds whose objects conflict with no other object of their parent
_CLASS_FIELDS = ("service_class", "downgrade_to")


def check_plan(client: AdminClient, steps: list[PlanStep], current: Current) -> dict[ObjectPlace, str]:
    """Return for each object that the gateway would refuse the reason. Raises NotReachable or NotAllowed."""
    refused: dict[ObjectPlace, str] = {}
    created = [step for step in steps if step.action is PlanAction.CREATE]
    new_classes, new_projects = ({step.name for step in created if step.kind == kind} for kind in ("class", "project"))
    is_known = False
    for step in steps:
        if missing := _missing_references(step, created, current):
            refused[step.kind, step.name] = f"there is no {missing[0]} {missing[1]!r}; declare it, or create it first"
            continue
        request = _request_of(step, current)
        if request is not None and not is_known:
            is_known = client.knows_dry_runs(DRY_RUN)
            if not is_known:  # it would make each change that is only to be checked
                raise CommandError(
                    "the gateway is of an earlier release without dry runs; upgrade it, then apply again"
                )
        if request is None or _named_classes(step) & new_classes or _named_projects(step) & new_projects:
            continue
        try:
            client.dry_run(request.method, request.path, request.body, DRY_RUN, **request.query)
        except Refused as exc:
            refused[step.kind, step.name] = str(exc)
    return refused


def _request_of(step: PlanStep, current: Current) -> AdminRequest | None:
    """Return the request of a step that creates or changes an object; None for any other, or without a parent."""
    declared, kind = step.declared, apply_kinds()[step.kind]
    if declared is None:
        return None
    if step.action is PlanAction.CHANGE and kind.change_request is not None:
        change = {name: value for name, (_, value) in step.changes.items()}
        return kind.change_request(declared, step.row or {}, change)
    if step.action not in (PlanAction.CREATE, PlanAction.REPLACE):
        return None
    if declared.parent is None:
        return kind.create_request(declared, "")
    parent_id = _parent_id(declared, current)
    return None if parent_id is None else kind.create_request(declared, parent_id)


def _parent_id(declared: DeclaredObject, current: Current) -> str | None:
    assert declared.parent is not None
    kind = apply_kinds()[declared.parent[0]]
    if (row := current.rows.get(declared.parent)) is not None:
        return kind.identity(row)
    if declared.kind not in WITHOUT_NAMES:
        return None
    others = (row for (name, _), row in current.rows.items() if name == kind.kind and row.get("status") != "suspended")
    return next((kind.identity(row) for row in others), None)


def _missing_references(step: PlanStep, created: list[PlanStep], current: Current) -> ObjectPlace | None:
    """Return an object that the step's object names and that neither exists nor is created by the plan."""
    if step.declared is None or step.action in IDLE:
        return None
    for field, kind in apply_kinds()[step.kind].references.items():
        known = {current.id_of(place) for place in current.rows if place[0] == kind}
        known |= {one.name for one in created if one.kind == kind}
        for name in step.declared.fields.get(field) or []:
            if name not in known:
                return kind, name
    return None


def _named_classes(step: PlanStep) -> set[str]:
    declared = step.declared
    if declared is None:
        return set()
    fields = declared.fields | declared.identity
    return {str(fields[name]) for name in _CLASS_FIELDS if fields.get(name) is not None}


def _named_projects(step: PlanStep) -> set[str]:
    """Return the projects that an object names; those of users that exist are ids already."""
    fields = {} if step.declared is None else step.declared.fields
    return {grant["project"] for grant in fields.get("grants", [])} | set(fields.get("project_ids") or [])
