"""Conversion of custom resources to the declarations of `moiety apply`. Pure.

The fields of a `spec` have the names of the file. A Tenant is an entry of `tenants`; an ApiKey and a Limit name their
tenant by the name of its object. Each object is read alone first, so that one that cannot be read is left out and
affects only the keys that it limits. Of two objects for the same thing the older one is applied, of two caps the lower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moiety_platform.cli.apply.document import ROOT, Document
from moiety_platform.cli.apply.spec import read_declared_objects
from moiety_platform.cli.controller.custom_objects import CustomKind, CustomObject, Ref
from moiety_platform.cli.errors import CommandError
from moiety_platform.prices.declared import nano_dollars_of
from moiety_platform.resources.apply_kind import DeclaredObject, ObjectPlace

PLACE = Path("custom resources")  # in place of a file
DEFAULT_PROJECT = "default"
ALERTS = "alert_at"  # the field of limits that is no cap


@dataclass
class Declarations:
    """Declared objects with the custom resource of each, and the custom resources that cannot be applied.

    Each custom resource has a declared object, a problem, or both. `tenants` are the names of the tenants that objects
    belong to; an object whose Tenant does not exist has none. `limited` are the ApiKeys of each Limit, `unenforced` the
    Limits that are not applied although no other one is in their place.
    """

    declared: list[DeclaredObject] = field(default_factory=list)
    owners: dict[ObjectPlace, Ref] = field(default_factory=dict)
    problems: dict[Ref, str] = field(default_factory=dict)
    tenants: dict[Ref, str] = field(default_factory=dict)
    limited: dict[Ref, list[Ref]] = field(default_factory=dict)
    unenforced: set[Ref] = field(default_factory=set)

    def add_problem(self, ref: Ref, why: str) -> None:
        """Record why an object is not applied, or not all of it."""
        before = self.problems.get(ref)
        self.problems[ref] = why if before is None else f"{before}; {why}"


def declarations_of(objects: Iterable[CustomObject]) -> Declarations:
    """Return what the custom resources declare."""
    made = Declarations()
    oldest_first = sorted(objects, key=lambda one: (one.created_at, one.name))
    tenants = {one.name: one for one in oldest_first if one.kind is CustomKind.TENANT}
    parts: dict[str, list[CustomObject]] = {name: [] for name in tenants}
    for one in oldest_first:
        if one.kind is CustomKind.TENANT:
            continue
        if (tenant := one.spec.get("tenant")) in tenants:
            parts[tenant].append(one)
        else:
            made.problems[one.ref] = f"there is no Tenant {tenant!r} in this namespace; create it"
    taken: dict[str, str] = {}
    for name, tenant_object in tenants.items():
        given = _name_of(tenant_object)
        made.tenants |= {one.ref: given for one in (tenant_object, *parts[name])}
        problem = _reason_against({**tenant_object.spec, "name": tenant_object.spec.get("name", name)})
        if given in taken:
            problem = f"the Tenant {taken[given]!r} has the same name {given!r}; choose another name"
        taken.setdefault(given, name)
        if problem:
            made.problems[tenant_object.ref] = problem
            for one in parts[name]:
                made.problems[one.ref] = f"the Tenant {name!r} is not applied: {problem}"
        else:
            _add_tenant(made, tenant_object, given, parts[name])
    return made


def _name_of(tenant: CustomObject) -> str:
    given = tenant.spec.get("name", tenant.name)
    return given if isinstance(given, str) else tenant.name


def _reason_against(entry: Mapping[str, Any]) -> str:
    """Return why the entry of a tenant cannot be read, else nothing."""
    try:
        read_declared_objects(Document(PLACE, {"tenants": [entry]}, {}))
    except CommandError as exc:
        return str(exc)
    return ""


def _add_tenant(made: Declarations, tenant: CustomObject, name: str, parts: list[CustomObject]) -> None:
    """Add a tenant with its keys and limits, as far as each can be read."""
    entry = _TenantEntry(tenant, name)
    keys = [one for one in parts if one.kind is CustomKind.API_KEY]
    limits = [one for one in parts if one.kind is CustomKind.LIMIT]
    for one in keys:
        if problem := _reason_against({"name": name, "projects": [_project_of(one, keys=[_key_of(one)])]}):
            made.problems[one.ref] = problem
        else:
            entry.add_key(one)
    for one in limits:
        made.limited[one.ref] = [key.ref for key in keys if _is_limited(key, one)]
        problem = _reason_against_limit(one, name) or entry.reason_against_target(one)
        if problem:
            made.problems[one.ref] = problem
            made.unenforced.add(one.ref)
        else:
            entry.add_limit(made, one)
    declared = read_declared_objects(Document(PLACE, {"tenants": [entry.document()]}, {}))
    made.declared += declared
    made.owners |= {one.place: _owner(entry.of_path, one.path) for one in declared}


def _project_of(one: CustomObject, **parts: Any) -> dict[str, Any]:
    return {"name": one.spec.get("project", DEFAULT_PROJECT), **parts}


def _key_of(one: CustomObject) -> dict[str, Any]:
    return {"name": one.name} | {name: value for name, value in one.spec.items() if name not in _OF_KEYS}


_OF_KEYS = ("tenant", "project", "name")


def _is_limited(key: CustomObject, limit: CustomObject) -> bool:
    """Return whether a Limit of the key's tenant applies to the key."""
    if limit.spec.get("key") is not None:
        return bool(limit.spec["key"] == key.name)
    return "project" not in limit.spec or bool(limit.spec["project"] == key.spec.get("project", DEFAULT_PROJECT))


def _reason_against_limit(one: CustomObject, tenant: str) -> str:
    """Return why a Limit cannot be read, else nothing."""
    if one.spec.get("key") is not None and "project" in one.spec:
        return "a Limit is for a key or for a project; remove `key` or `project`"
    limits = one.spec.get("limits")
    if problem := _reason_against({"name": tenant, "projects": [_project_of(one)], "limits": limits}):
        return problem
    if not isinstance(limits, Mapping) or all(value is None for name, value in limits.items() if name != ALERTS):
        return "`limits` has no cap; give one, such as tokens_per_day"
    return ""


def _cap(name: str, value: Any) -> int:
    return nano_dollars_of(name, value) if name.startswith("dollars") else int(value)


class _TenantEntry:
    """Entry of a file for one tenant, while it is being filled. `of_path` has the custom resource of each part."""

    def __init__(self, tenant: CustomObject, name: str) -> None:
        self._own: dict[str, Any] = {**tenant.spec, "name": name}
        self._projects: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, tuple[dict[str, Any], str]] = {}  # entry and path of each ApiKey that is applied
        self._limits: dict[str, dict[str, tuple[Any, CustomObject]]] = {}  # by path and field
        self._places: dict[str, dict[str, Any]] = {}  # entry at each path with limits
        self.of_path: dict[str, Ref] = {f"{ROOT}.tenants[0]": tenant.ref}

    def add_key(self, one: CustomObject) -> None:
        """Add an ApiKey."""
        project, path = self._project(one)
        path = f"{path}.keys[{len(project['keys'])}]"
        project["keys"].append(_key_of(one))
        self._keys[one.name], self.of_path[path] = (project["keys"][-1], path), one.ref

    def reason_against_target(self, one: CustomObject) -> str:
        """Return why there is nothing that a Limit could be for, else nothing."""
        key = one.spec.get("key")
        if key is None or key in self._keys:
            return ""
        return f"the tenant has no ApiKey {key!r} that can be applied; create or correct it"

    def add_limit(self, made: Declarations, one: CustomObject) -> None:
        """Add a Limit; of two caps of one kind the lower one is applied, and the other object has a problem."""
        if one.spec.get("key") is not None:
            target, path = self._keys[one.spec["key"]]
        elif "project" in one.spec:
            target, path = self._project(one)
        else:
            target, path = self._own, f"{ROOT}.tenants[0]"
        self._places[path] = target
        limits = self._limits.setdefault(path, {})
        for name, value in one.spec["limits"].items():
            if value is None:
                continue
            before = limits.get(name)
            if before is None:
                limits[name] = value, one
                continue
            applied, other = before, one
            if name != ALERTS and _cap(name, value) < _cap(name, before[0]):
                applied, other = (value, one), before[1]
            limits[name] = lower, kept = applied
            made.add_problem(
                other.ref,
                f"the Limit {kept.name!r} gives {name} too, and its {lower} is applied; remove it from one Limit",
            )

    def document(self) -> dict[str, Any]:
        """Return the entry, and complete `of_path`."""
        for path, limits in self._limits.items():
            self._places[path]["limits"] = {name: value for name, (value, _) in limits.items()}
            self.of_path |= {f"{path}.limits.{name}": one.ref for name, (_, one) in limits.items()}
        return {**self._own, "projects": list(self._projects.values())} if self._projects else self._own

    def _project(self, one: CustomObject) -> tuple[dict[str, Any], str]:
        name = one.spec.get("project", DEFAULT_PROJECT)
        if name not in self._projects:
            self.of_path[f"{ROOT}.tenants[0].projects[{len(self._projects)}]"] = one.ref
            self._projects[name] = {"name": name, "keys": []}
        return self._projects[name], f"{ROOT}.tenants[0].projects[{list(self._projects).index(name)}]"


def _owner(of_path: Mapping[str, Ref], path: str) -> Ref:
    """Return the custom resource of a part: that of the closest part around it."""
    while path not in of_path:
        path = path[: max(path.rfind("."), path.rfind("["))]
    return of_path[path]
