"""Execution of a plan over the admin API: each object whole or not at all.

Errors are recorded, and steps that depend on a failed one are skipped.

An object is claimed in the ledger before it is created, and its id is recorded after that: if the process is killed in
between, the next run finds the claim and continues. A change sends the ETag of the state that it was planned for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.current import Current
from moiety_platform.cli.apply.key_secrets import KeySecrets, SecretFileError
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.apply.plan import IDLE, PlanAction, PlanStep
from moiety_platform.cli.errors import CommandError, NotAllowed, NotReachable, Refused
from moiety_platform.cluster.errors import ClusterError
from moiety_platform.resources.apply_kind import AdminRequest, ApplyKind, DeclaredObject, ObjectPlace, Row, with_ids

ONLY_NEW = {"If-None-Match": "*"}


@dataclass
class ApplyOutcome:
    """Result of an execution.

    `failed` has a sentence for each object that was not applied; `texts` has new keys that are in no Secret.
    """

    done: int = 0
    failed: dict[ObjectPlace, str] = field(default_factory=dict)
    texts: dict[ObjectPlace, str] = field(default_factory=dict)


class PlanExecutor:
    """Executor of a plan; it owns the outcome, and the ids of existing objects."""

    def __init__(self, client: AdminClient, secrets: KeySecrets, current: Current, source: str) -> None:
        self._client, self._secrets, self._source = client, secrets, source
        self._kinds = apply_kinds()
        self._ids = {place: self._kinds[place[0]].identity(row) or "" for place, row in current.rows.items()}
        self._tenants: dict[ObjectPlace, str] = {
            place: self._kinds[place[0]].tenant_of(row) for place, row in current.rows.items()
        }
        self.outcome = ApplyOutcome()

    def run_plan(self, steps: list[PlanStep]) -> ApplyOutcome:
        """Run the steps. Raises NotReachable or NotAllowed, after which nothing more can be done."""
        for step in steps:
            place = step.kind, step.name
            if step.action in IDLE:
                continue
            parent = step.declared.parent if step.declared is not None else None
            if parent is not None and parent not in self._ids:
                self.outcome.failed[place] = f"skipped, since the {parent[0]} {parent[1]!r} does not exist"
                continue
            try:
                self._ACTIONS[step.action](self, step)
                self.outcome.done += 1
            except (NotReachable, NotAllowed):
                raise
            except (CommandError, ClusterError) as exc:
                self.outcome.failed[place] = str(exc)
        return self.outcome

    def _create(self, step: PlanStep) -> None:
        declared = self._referring(_declared_object(step))
        self._claim(declared, None)
        try:
            self._ids[declared.place] = self._make(declared)
        except (Refused, ClusterError, SecretFileError):
            self._release(step)  # else a later object created by other means under this name would count as the file's
            raise
        self._claim(declared, self._ids[declared.place])

    def _referring(self, declared: DeclaredObject) -> DeclaredObject:
        """Return the object with the ids of those that it names, also of the ones that this run has created."""
        return with_ids(declared, self._kinds[declared.kind].references, self._ids.get)

    def _make(self, declared: DeclaredObject) -> str:
        """Create the object, and keep its text if it has one; return its identity."""
        kind = self._kinds[declared.kind]
        request = kind.create_request(declared, self._ids[declared.parent] if declared.parent else "")
        made = self._send(request, ONLY_NEW if request.method == "PUT" else None)
        row: Row = made[kind.kind] if kind.has_secret else made
        if tenant := kind.tenant_of(row):
            self._tenants[declared.place] = tenant
        if (after := kind.follow_up_request(declared, row)) is not None:
            self._send(after)
        if kind.has_secret:
            self._keep_secret(kind, declared, row, made["secret"])
        return kind.identity(row) or ""

    def _keep_secret(self, kind: ApplyKind, declared: DeclaredObject, row: Row, text: str) -> None:
        """Put the text of a new object into its Secret, or show it; remove the object if it cannot be kept."""
        if declared.key_secret is None:
            self.outcome.texts[declared.place] = text
            return
        try:
            self._secrets.put(declared.key_secret, text)
        except (ClusterError, SecretFileError):
            self._remove(kind, row)
            raise

    def _change(self, step: PlanStep) -> None:
        declared, row = self._referring(_declared_object(step)), step.row or {}
        kind = self._kinds[declared.kind]
        assert kind.change_request is not None, "only objects that can be changed have changes"
        self._claim(declared, self._ids[declared.place])
        change = {name: declared.fields[name] for name in step.changes}
        self._send(kind.change_request(declared, row, change), self._tag(kind, row, step))

    def _replace(self, step: PlanStep) -> None:
        declared = _declared_object(step)
        old = self._ids[declared.place]
        self._ids[declared.place] = self._make(declared)
        self._claim(declared, self._ids[declared.place])
        self._remove(self._kinds[declared.kind], {**(step.row or {}), "id": old})

    def _adopt(self, step: PlanStep) -> None:
        self._claim(_declared_object(step), self._ids[step.kind, step.name])

    def _delete(self, step: PlanStep) -> None:
        self._suspend(step)
        self._release(step)

    def _suspend(self, step: PlanStep) -> None:
        kind, row = self._kinds[step.kind], step.row or {}
        self._remove(kind, row, None if kind.has_secret else self._tag(kind, row, step))

    def _release(self, step: PlanStep) -> None:
        self._client.call("DELETE", "/declarations", kind=step.kind, name=step.name)

    def _remove(self, kind: ApplyKind, row: Row, headers: dict[str, str] | None = None) -> None:
        assert kind.remove_request is not None, "what is not removed is released"
        self._send(kind.remove_request(row), headers)

    def _claim(self, declared: DeclaredObject, object_id: str | None) -> None:
        tenant = self._tenants.get(declared.place) or (self._tenants.get(declared.parent) if declared.parent else None)
        if tenant and declared.parent:
            self._tenants.setdefault(declared.place, tenant)
        ledger = {"kind": declared.kind, "name": declared.name, "source": self._source, "object_id": object_id}
        self._client.call("PUT", "/declarations", {**ledger, "tenant_id": tenant or None})

    def _tag(self, kind: ApplyKind, row: Row, step: PlanStep) -> dict[str, str]:
        """Return the precondition that the object is unchanged since the plan.

        Raises CommandError if it has changed.
        """
        request = kind.read_request(row)
        now, tag = self._client.tagged(request.path, **request.query)
        if any(now.get(name) != before for name, (before, _) in step.changes.items()):
            raise CommandError("it was changed elsewhere after it was read, so it was not changed here; apply again")
        return {"If-Match": tag}

    def _send(self, request: AdminRequest, headers: dict[str, str] | None = None) -> Row:
        answer: Row = self._client.call(request.method, request.path, request.body, headers, **request.query)
        return answer

    _ACTIONS: ClassVar[dict[PlanAction, Callable[[PlanExecutor, PlanStep], None]]] = {
        PlanAction.CREATE: _create,
        PlanAction.CHANGE: _change,
        PlanAction.REPLACE: _replace,
        PlanAction.ADOPT: _adopt,
        PlanAction.DELETE: _delete,
        PlanAction.SUSPEND: _suspend,
        PlanAction.RELEASE: _release,
    }


def _declared_object(step: PlanStep) -> DeclaredObject:
    assert step.declared is not None
    return step.declared
