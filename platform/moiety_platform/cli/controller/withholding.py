"""Steps of a plan that wait until custom resources are corrected: new keys without their limits, and removals. Pure.

A key is created only together with all limits for it. An object of a tenant is removed only while all custom resources
of this tenant can be applied, since a typing error could otherwise delete it; but a key is revoked as soon as its
ApiKey or the Tenant is deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from moiety_platform.cli.apply.plan import PlanAction, PlanStep
from moiety_platform.cli.controller.custom_objects import CustomKind, Ref
from moiety_platform.cli.controller.declarations import Declarations
from moiety_platform.resources.apply_kind import ObjectPlace

_REMOVALS = frozenset({PlanAction.DELETE, PlanAction.SUSPEND, PlanAction.RELEASE})
_NEW_KEYS = frozenset({PlanAction.CREATE, PlanAction.REPLACE})


def keys_without_limits(made: Declarations, refused: Collection[ObjectPlace]) -> dict[Ref, str]:
    """Return the ApiKeys of which a Limit is not applied, each with the reason why it must not be created."""
    limits = made.unenforced | {made.owners[place] for place in refused if place[0] == "limit" and place in made.owners}
    found: dict[Ref, str] = {}
    for limit in sorted(limits):
        for key in made.limited.get(limit, ()):
            found.setdefault(
                key,
                f"the key is not created or replaced while its Limit {limit[1]!r} is not applied; correct the Limit",
            )
    return found


def withhold_steps(made: Declarations, steps: Sequence[PlanStep], refused: Mapping[ObjectPlace, str]) -> list[PlanStep]:
    """Return the plan with the steps that can be done now; the others say why not.

    `refused` are the objects that the gateway refuses.
    """
    held = keys_without_limits(made, refused)
    wrong = set(made.problems) | set(held) | {made.owners[place] for place in refused if place in made.owners}
    found = []
    for step in steps:
        owner = made.owners.get((step.kind, step.name))
        if step.kind == "key" and step.action in _NEW_KEYS and owner in held:
            found.append(replace(step, action=PlanAction.REFUSE, why=held[owner]))
        elif step.action in _REMOVALS and (cause := _reason_to_keep(step, made, wrong)) is not None:
            why = f"{cause[0]} {cause[1]!r} of this tenant is not applied; correct or delete it"
            found.append(replace(step, action=PlanAction.LEFT, why=why))
        else:
            found.append(step)
    return found


def _reason_to_keep(step: PlanStep, made: Declarations, wrong: Collection[Ref]) -> Ref | None:
    """Return the custom resource that must be corrected before the object is removed; None if there is none."""
    for ref in sorted(wrong):
        tenant = made.tenants.get(ref)
        if tenant is None:  # its Tenant is deleted, and so is the object
            continue
        is_of_tenant = (
            step.name == tenant if step.kind == "tenant" else step.name.startswith((f"{tenant}/", f"{tenant}: "))
        )
        is_own = step.kind != "key" or (ref[0] is CustomKind.API_KEY and step.name.endswith(f"/{ref[1]}"))
        if is_of_tenant and is_own:
            return ref
    return None
