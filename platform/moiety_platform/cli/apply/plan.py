"""Plan of the steps that turn the current state into the wanted state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moiety_platform.cli.apply.current import Current
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.resources.apply_kind import ApplyKind, DeclaredObject, ObjectPlace, Removal, Row, with_ids


class PlanAction(StrEnum):
    CREATE = "create"
    CHANGE = "change"
    REPLACE = "replace"  # created again, since it cannot be changed or its text was lost
    KEEP = "unchanged"
    ADOPT = "adopt"  # unchanged, and owned by the file from now on
    DELETE = "delete"
    SUSPEND = "suspend"  # for tenants, which are not deleted
    RELEASE = "let go"  # it stays, and is not declared any more
    LEFT = "left"  # it was removed from the file, and stays until --prune
    REFUSE = "refused"


IDLE = frozenset({PlanAction.KEEP, PlanAction.LEFT, PlanAction.REFUSE})


@dataclass(frozen=True)
class PlanStep:
    """One object and the action on it. `changes` are field → (before, after); `row` is the current state."""

    action: PlanAction
    kind: str
    name: str
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    why: str = ""
    declared: DeclaredObject | None = None
    row: Row | None = None


@dataclass(frozen=True)
class PlanTerms:
    """Options of the plan.

    `kept` says for a declared object with a Secret whether that has its text; a string is the reason why this is
    unknown. `shows_keys`: new keys are printed.
    """

    source: str
    prune: bool = False
    adopt: bool = False
    shows_keys: bool = False
    kept: Mapping[ObjectPlace, bool | str] = field(default_factory=dict)


def make_plan(declared_objects: Sequence[DeclaredObject], current: Current, terms: PlanTerms) -> list[PlanStep]:
    """Return the steps in executable order."""
    kinds = apply_kinds()
    order = list(kinds)
    ordered = sorted(
        declared_objects, key=lambda declared: (order.index(declared.kind), *kinds[declared.kind].rank(declared))
    )
    known = [with_ids(one, kinds[one.kind].references, current.id_of) for one in ordered]
    steps = [_step(declared, current, terms) for declared in known]
    steps += _removal_steps({declared.place for declared in declared_objects}, current, terms)
    return steps


def _step(declared: DeclaredObject, current: Current, terms: PlanTerms) -> PlanStep:
    kind, row, claim = (
        apply_kinds()[declared.kind],
        current.rows.get(declared.place),
        current.claims.get(declared.place),
    )
    elsewhere = claim is not None and claim.source != terms.source
    owned = claim is not None and not elsewhere and claim.object_id in (None, kind.identity(row))
    if kind.has_secret and (row is None or owned):
        return _step_of_secret(declared, row, terms)
    if row is None:
        created = {name: (None, value) for name, value in declared.fields.items()}
        return PlanStep(PlanAction.CREATE, declared.kind, declared.name, created, declared=declared)
    changes = differences(declared.fields, row)
    if not changes:
        adopted = terms.adopt and not owned and not elsewhere
        action = PlanAction.ADOPT if adopted or (owned and claim and claim.object_id is None) else PlanAction.KEEP
        return PlanStep(action, declared.kind, declared.name, why=kind.note(declared, row), declared=declared, row=row)
    if elsewhere and claim is not None:
        why = f"declared by {claim.source!r}: change it there, or leave it out here"
        return PlanStep(PlanAction.REFUSE, declared.kind, declared.name, changes, why, declared, row)
    if owned or terms.adopt or (claim is None and row.get("shipped")):
        return PlanStep(PlanAction.CHANGE, declared.kind, declared.name, changes, declared=declared, row=row)
    why = "created by other means: leave it out, choose another name, or manage it with --adopt"
    return PlanStep(PlanAction.REFUSE, declared.kind, declared.name, changes, why, declared, row)


def _step_of_secret(declared: DeclaredObject, row: Row | None, terms: PlanTerms) -> PlanStep:
    """Return the step of an object whose text is shown once: it is created once, and never changed."""
    changes = {name: (None if row is None else row.get(name), value) for name, value in declared.fields.items()}
    kept = terms.kept.get(declared.place, True)
    if isinstance(kept, str):
        return PlanStep(PlanAction.REFUSE, declared.kind, declared.name, why=kept, declared=declared, row=row)
    if row is not None:
        changes = differences(declared.fields, row)
        if why := _reason_to_keep(row, changes):
            return PlanStep(PlanAction.KEEP, declared.kind, declared.name, why=why, declared=declared, row=row)
        if not changes and kept:
            return PlanStep(PlanAction.KEEP, declared.kind, declared.name, declared=declared, row=row)
        if not kept:
            changes["keySecret"] = ("lost", declared.key_secret)
    if declared.key_secret is None and not terms.shows_keys:
        why = "its text would be lost: give keySecret for a Secret of the cluster, --secrets-file, or --show-keys"
        return PlanStep(PlanAction.REFUSE, declared.kind, declared.name, changes, why, declared, row)
    return PlanStep(
        PlanAction.CREATE if row is None else PlanAction.REPLACE,
        declared.kind,
        declared.name,
        changes,
        declared=declared,
        row=row,
    )


def _reason_to_keep(row: Row, changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return why an object with a secret is left as it is although it does not work any more, else nothing."""
    status = row.get("status", "active")
    if row.get("replaced_by"):
        return "rotated by hand, and left so"
    if status == "expired":
        return "" if "expires_at" in changes else "expired; set a later expires_at to create its successor"
    return "" if status == "active" else f"{status} by hand, and left so"


def _removal_steps(places: Iterable[ObjectPlace], current: Current, terms: PlanTerms) -> list[PlanStep]:
    """Return the steps for objects that this file declared earlier and does not any more."""
    still = frozenset(places)
    gone = [place for place, claim in current.claims.items() if claim.source == terms.source and place not in still]
    steps = []
    kinds = apply_kinds()
    order = list(kinds)[::-1]  # dependents come first
    for place in sorted(gone, key=lambda place: (order.index(place[0]), place)):
        kind, row = kinds[place[0]], current.rows.get(place)
        ours = row is not None and current.claims[place].object_id in (None, kind.identity(row))
        if kind.removal is Removal.SUSPEND and row is not None and ours and row["status"] != "active":
            continue  # done: it stays in the ledger, and is ours if it is declared again
        action, why = _removal(kind, row if ours else None)
        if not terms.prune:
            action, why = PlanAction.LEFT, "no longer in the file: --prune deletes it"
        steps.append(PlanStep(action, *place, why=why, row=row if ours else None))
    return steps


_ACTIONS = {
    Removal.DELETE: PlanAction.DELETE,
    Removal.SUSPEND: PlanAction.SUSPEND,
    Removal.RELEASE: PlanAction.RELEASE,
}


def _removal(kind: ApplyKind, row: Row | None) -> tuple[PlanAction, str]:
    if row is None or row.get("status") in ("revoked", "expired"):
        return PlanAction.RELEASE, "gone already"
    if row.get("shipped"):
        return PlanAction.RELEASE, "built-in classes are not deleted; it is not changed"
    return _ACTIONS[kind.removal], kind.removal_reason


def differences(fields: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the changes of the fields that the file gives."""
    return {name: (row.get(name), value) for name, value in fields.items() if row.get(name) != value}
