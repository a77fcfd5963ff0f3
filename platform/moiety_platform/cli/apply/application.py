"""One application of declared objects at a gateway: plan, check, execution. Knows no file and no output."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.current import read_current
from moiety_platform.cli.apply.execute import ApplyOutcome, PlanExecutor
from moiety_platform.cli.apply.key_secrets import KeySecrets
from moiety_platform.cli.apply.plan import PlanAction, PlanStep, PlanTerms, make_plan
from moiety_platform.cli.apply.plan_check import check_plan
from moiety_platform.cli.errors import Refused
from moiety_platform.resources.apply_kind import DeclaredObject, ObjectPlace
from moiety_platform.resources.paths import path_of


def _all_steps(steps: list[PlanStep], _: dict[ObjectPlace, str]) -> list[PlanStep]:
    return steps


@dataclass(frozen=True, kw_only=True)
class ApplyTerms:
    """Terms of an application. `secrets_file` takes texts of new keys in place of the cluster's Secrets.

    `review` gets the checked plan and the refused objects, and returns the plan that is executed.
    """

    source: str
    account: Path
    secrets_file: Path | None = None
    dry_run: bool = False
    prune: bool = False
    adopt: bool = False
    show_keys: bool = False
    partial: bool = False
    review: Callable[[list[PlanStep], dict[ObjectPlace, str]], list[PlanStep]] = _all_steps


def apply_declared(
    client: AdminClient, declared: Sequence[DeclaredObject], terms: ApplyTerms
) -> tuple[list[PlanStep], ApplyOutcome, dict[ObjectPlace, str]]:
    """Make the gateway's objects match the declared ones.

    Return the steps, the outcome, and the objects that the check refused, which `outcome.failed` contains too; if there
    are some, nothing is done unless the terms are `partial`. Raises CommandError.
    """
    current = read_current(client)
    with KeySecrets(os.environ, terms.account, functools.partial(is_revoked, client), terms.secrets_file) as secrets:
        kept = secrets.check_secrets(declared, current)
        steps = make_plan(
            list(declared), current, PlanTerms(terms.source, terms.prune, terms.adopt, terms.show_keys, kept)
        )
        refused = _refused_objects(steps) | check_plan(client, steps, current)
        steps = terms.review(steps, refused)
        refused |= _refused_objects(steps)
        if terms.dry_run or (refused and not terms.partial):
            outcome = ApplyOutcome()
        else:
            outcome = PlanExecutor(client, secrets, current, terms.source).run_plan(steps)
    outcome.failed = refused | outcome.failed
    return steps, outcome, refused


def _refused_objects(steps: Sequence[PlanStep]) -> dict[ObjectPlace, str]:
    return {(step.kind, step.name): step.why for step in steps if step.action is PlanAction.REFUSE}


def is_revoked(client: AdminClient, key_id: str) -> bool:
    """Return whether the key exists and is revoked."""
    try:
        return bool(client.get(path_of("keys", key_id))["status"] == "revoked")
    except Refused:
        return False
