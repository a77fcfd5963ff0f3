"""Execution of a plan over the admin API: each object whole or not at all.

Errors are recorded, and steps that depend on a failed one are skipped.

An object is claimed in the ledger before it is created, and its id is recorded after that: if the process is killed in
between, the next run finds the claim and continues. A change sends the ETag of the state that it was planned for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.apply.current import Current, Place
from moiety_platform.cli.apply.key_secrets import KeySecrets
from moiety_platform.cli.apply.plan import IDLE, PlanAction, PlanStep, identity
from moiety_platform.cli.apply.spec import Wanted
from moiety_platform.cli.errors import CommandError, NotAllowed, NotReachable, Refused
from moiety_platform.cli.gateway_client import path_of
from moiety_platform.cluster.errors import ClusterError

ONLY_NEW = {"If-None-Match": "*"}


@dataclass
class ApplyOutcome:
    """Result of an execution.

    `failed` has a sentence for each object that was not applied; `texts` has new keys that are in no Secret.
    """

    done: int = 0
    failed: dict[Place, str] = field(default_factory=dict)
    texts: dict[Place, str] = field(default_factory=dict)


class PlanExecutor:
    """Executor of a plan; it owns the outcome, and the ids of existing objects."""

    def __init__(self, client: AdminClient, secrets: KeySecrets, current: Current, source: str) -> None:
        self._client, self._secrets, self._source = client, secrets, source
        self._ids = {place: identity(place[0], row) or "" for place, row in current.rows.items()}
        self._tenants: dict[Place, str] = {
            place: row["id"] if place[0] == "tenant" else row.get("tenant_id") or ""
            for place, row in current.rows.items()
        }
        self.outcome = ApplyOutcome()

    def carry_out(self, steps: list[PlanStep]) -> ApplyOutcome:
        """Run the steps. Raises NotReachable or NotAllowed, after which nothing more can be done."""
        for step in steps:
            place = step.kind, step.name
            if step.action in IDLE:
                continue
            parent = step.wanted.parent if step.wanted is not None else None
            if parent is not None and parent not in self._ids:
                self.outcome.failed[place] = f"skipped, since the {parent[0]} {parent[1]!r} is not there"
                continue
            try:
                self._DEEDS[step.action](self, step)
                self.outcome.done += 1
            except (NotReachable, NotAllowed):
                raise
            except (CommandError, ClusterError) as exc:
                self.outcome.failed[place] = str(exc)
        return self.outcome

    def _create(self, step: PlanStep) -> None:
        one = _wanted(step)
        self._claim(one, None)
        try:
            self._ids[one.place] = self._make(one)
        except (Refused, ClusterError):
            self._release(step)  # else a later object made by hand under this name would count as the file's
            raise
        self._claim(one, self._ids[one.place])

    def _make(self, one: Wanted) -> str:
        """Create the object; return its id."""
        if one.kind in ("key", "webhook"):
            return self._make_text(one)
        if one.kind == "limit":
            made = self._call("PUT", "/quotas", self._limit(one), ONLY_NEW)
        elif one.kind == "price":
            made = self._call("PUT", "/prices", {**one.also, **one.fields}, ONLY_NEW)
        elif one.kind == "project":
            made = self._call("POST", "/projects", {"name": one.own, "tenant_id": self._parent(one)})
            self._tenants[one.place] = made["tenant_id"]
        elif one.kind == "tenant":
            made = self._make_tenant(one)
        else:
            made = self._call("POST", "/classes", {"name": one.own, **one.fields})
        return identity(one.kind, made) or ""

    def _make_tenant(self, one: Wanted) -> dict[str, Any]:
        fields = dict(one.fields)
        status = fields.pop("status", "active")
        made = self._call("POST", "/tenants", fields)
        self._tenants[one.place] = made["id"]
        if status != made["status"]:
            self._call("PATCH", path_of("tenants", made["id"]), {"status": status})
        return made

    def _make_text(self, one: Wanted) -> str:
        """Create a key, or a webhook with its signing secret, and keep the text; undo it if the text cannot be kept."""
        if one.kind == "key":
            body = {"name": one.own, "project_id": self._parent(one), **one.fields}
            made = self._call("POST", "/keys", body)
            made_id, undo = str(made["key"]["id"]), ("POST", path_of("keys", made["key"]["id"], "revoke"))
        else:
            made = self._call("POST", "/webhooks", one.fields)
            made_id, undo = str(made["webhook"]["id"]), ("DELETE", path_of("webhooks", made["webhook"]["id"]))
        if one.key_secret is None:
            self.outcome.texts[one.place] = made["secret"]
            return made_id
        try:
            self._secrets.put(one.key_secret, made["secret"])
        except ClusterError:
            self._call(*undo)
            raise
        return made_id

    def _change(self, step: PlanStep) -> None:
        one, row = _wanted(step), step.row or {}
        self._claim(one, self._ids[one.place])
        change = {name: value for name, (_, value) in step.changes.items()}
        if one.kind == "limit":
            tag = self._tag(path_of("quotas", row["id"]), step)
            self._call("PUT", "/quotas", self._limit(one), tag)
        elif one.kind == "price":
            whole = {name: row[name] for name in ("input", "output", "cached_input")}
            tag = self._tag("/prices/one", step, **one.also)
            self._call("PUT", "/prices", {**whole, **one.also, **change}, tag)
        else:
            path = path_of("tenants", row["id"]) if one.kind == "tenant" else path_of("classes", one.own)
            self._call("PATCH", path, change, self._tag(path, step))

    def _replace(self, step: PlanStep) -> None:
        one = _wanted(step)
        old = self._ids[one.place]
        self._ids[one.place] = self._make(one)
        self._claim(one, self._ids[one.place])
        self._end(one.kind, old)

    def _adopt(self, step: PlanStep) -> None:
        self._claim(_wanted(step), self._ids[step.kind, step.name])

    def _delete(self, step: PlanStep) -> None:
        row = step.row or {}
        if step.kind == "limit":
            self._call("DELETE", path_of("quotas", row["id"]), None, self._tag(path_of("quotas", row["id"]), step))
        elif step.kind == "price":
            identity_of = {"model": row["model"], "service_class": row["service_class"]}
            tag = self._tag("/prices/one", step, **identity_of)
            self._client.call("DELETE", "/prices", headers=tag, **identity_of)
        elif step.kind == "class":
            self._call("DELETE", path_of("classes", step.name), None, self._tag(path_of("classes", step.name), step))
        else:
            self._end(step.kind, str(row["id"]))
        self._release(step)

    def _suspend(self, step: PlanStep) -> None:
        path = f"/tenants/{(step.row or {})['id']}"
        self._call("PATCH", path, {"status": "suspended"}, self._tag(path, step))

    def _release(self, step: PlanStep) -> None:
        self._client.call("DELETE", "/declarations", kind=step.kind, name=step.name)

    def _end(self, kind: str, thing_id: str) -> None:
        if kind == "key":
            self._call("POST", path_of("keys", thing_id, "revoke"))
        else:
            self._call("DELETE", path_of("webhooks", thing_id))

    def _claim(self, one: Wanted, object_id: str | None) -> None:
        tenant = self._tenants.get(one.place) or (self._tenants.get(one.parent) if one.parent else None)
        if tenant and one.parent:
            self._tenants.setdefault(one.place, tenant)
        ledger = {"kind": one.kind, "name": one.name, "source": self._source, "object_id": object_id}
        self._call("PUT", "/declarations", {**ledger, "tenant_id": tenant or None})

    def _tag(self, path: str, step: PlanStep, **parameters: Any) -> dict[str, str]:
        """Return the precondition that the object is unchanged since the plan.

        Raises CommandError if it has changed.
        """
        now, tag = self._client.tagged(path, **parameters)
        if any(now.get(name) != before for name, (before, _) in step.changes.items()):
            raise CommandError("somebody changed it after this had looked: it was left as it is; apply again")
        return {"If-Match": tag}

    def _limit(self, one: Wanted) -> dict[str, Any]:
        level = one.parent[0] if one.parent else ""
        return {"level": level, "scope_id": self._parent(one), "kind": one.own, **one.fields}

    def _parent(self, one: Wanted) -> str:
        return self._ids[one.parent] if one.parent else ""

    def _call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.call(method, path, body, headers)
        return answer

    _DEEDS: ClassVar[dict[PlanAction, Callable[[PlanExecutor, PlanStep], None]]] = {
        PlanAction.CREATE: _create,
        PlanAction.CHANGE: _change,
        PlanAction.REPLACE: _replace,
        PlanAction.ADOPT: _adopt,
        PlanAction.DELETE: _delete,
        PlanAction.SUSPEND: _suspend,
        PlanAction.RELEASE: _release,
    }


def _wanted(step: PlanStep) -> Wanted:
    assert step.wanted is not None
    return step.wanted
