"""Conversion of custom resources to the declarations of `moiety apply`, and of its outcome to their conditions. Pure.

The fields of a `spec` have the names of the file. A Tenant is an entry of `tenants`; an ApiKey and a Limit name their
tenant by the name of its object. Objects of one tenant that cannot be read do not affect those of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from moiety_platform.cli.apply.document import ROOT, Document
from moiety_platform.cli.apply.spec import read_declared_objects
from moiety_platform.cli.errors import CommandError
from moiety_platform.resources.apply_kind import DeclaredObject, ObjectPlace

PLACE = Path("custom resources")  # in place of a file
DEFAULT_PROJECT = "default"


class CustomKind(StrEnum):
    """Kinds of the API group `moiety.dev`."""

    TENANT = "Tenant"
    API_KEY = "ApiKey"
    LIMIT = "Limit"


@dataclass(frozen=True)
class CustomObject:
    """An object as the API stores it."""

    kind: CustomKind
    name: str
    generation: int
    spec: Mapping[str, Any]
    conditions: tuple[Mapping[str, Any], ...] = ()

    @property
    def ref(self) -> tuple[CustomKind, str]:
        return self.kind, self.name


Ref = tuple[CustomKind, str]


@dataclass
class Declarations:
    """Declared objects with the custom resource of each, and the custom resources that cannot be applied."""

    declared: list[DeclaredObject] = field(default_factory=list)
    owners: dict[ObjectPlace, Ref] = field(default_factory=dict)
    problems: dict[Ref, str] = field(default_factory=dict)


def declarations_of(objects: Iterable[CustomObject]) -> Declarations:
    """Return what the custom resources declare."""
    made = Declarations()
    sorted_objects = sorted(objects, key=lambda one: (list(CustomKind).index(one.kind), one.name))
    tenants = {one.name: one for one in sorted_objects if one.kind is CustomKind.TENANT}
    others = [one for one in sorted_objects if one.kind is not CustomKind.TENANT]
    for one in others:
        if one.spec["tenant"] not in tenants:
            made.problems[one.ref] = f"there is no Tenant {one.spec['tenant']!r} in this namespace; create it"
    names: dict[str, str] = {}
    for name, tenant in tenants.items():
        given = tenant.spec.get("name", name)
        if given in names:
            made.problems[tenant.ref] = f"the Tenant {names[given]!r} has the same name {given!r}; choose another name"
            continue
        names[given] = name
        _add_tenant(made, tenant, given, [one for one in others if one.spec["tenant"] == name])
    return made


def _add_tenant(made: Declarations, tenant: CustomObject, name: str, others: list[CustomObject]) -> None:
    """Add a tenant with its keys and limits, or the reason why none of them can be applied."""
    entry: dict[str, Any] = {**tenant.spec, "name": name}
    projects: dict[str, dict[str, Any]] = {}
    of_path: dict[str, Ref] = {f"{ROOT}.tenants[0]": tenant.ref}

    def project_of(one: CustomObject) -> dict[str, Any]:
        project: str = one.spec.get("project", DEFAULT_PROJECT)
        if project not in projects:
            of_path[f"{ROOT}.tenants[0].projects[{len(projects)}]"] = one.ref
            projects[project] = {"name": project, "keys": []}
        return projects[project]

    keys: dict[str, tuple[dict[str, Any], str]] = {}
    for one in others:
        if one.kind is CustomKind.API_KEY:
            project = project_of(one)
            key = {field_name: value for field_name, value in one.spec.items() if field_name not in _OF_KEYS}
            at = list(projects).index(project["name"])
            path = f"{ROOT}.tenants[0].projects[{at}].keys[{len(project['keys'])}]"
            project["keys"].append({"name": one.name, **key})
            keys[one.name], of_path[path] = (project["keys"][-1], path), one.ref
    for one in others:
        if one.kind is not CustomKind.LIMIT:
            continue
        if one.spec.get("key") is not None:
            found = keys.get(one.spec["key"])
            if found is None:
                made.problems[one.ref] = f"the tenant has no ApiKey {one.spec['key']!r}; create it"
                continue
            target, path = found
        elif "project" in one.spec:
            target = project_of(one)
            path = f"{ROOT}.tenants[0].projects[{list(projects).index(target['name'])}]"
        else:
            target, path = entry, f"{ROOT}.tenants[0]"
        limits = target.setdefault("limits", {})
        twice = sorted(limits.keys() & one.spec["limits"].keys())
        if twice:
            made.problems[one.ref] = (
                f"another object limits {', '.join(twice)} there already; remove it from one of them"
            )
            continue
        limits |= one.spec["limits"]
        of_path |= {f"{path}.limits.{kind}": one.ref for kind in one.spec["limits"]}
    if projects:
        entry["projects"] = list(projects.values())
    try:
        declared = read_declared_objects(Document(PLACE, {"tenants": [entry]}, {}))
    except CommandError as exc:
        made.problems |= {one.ref: str(exc) for one in (tenant, *others) if one.ref not in made.problems}
        return
    made.declared += declared
    made.owners |= {one.place: _owner(of_path, one.path) for one in declared}


_OF_KEYS = ("tenant", "project", "name")


def _owner(of_path: Mapping[str, Ref], path: str) -> Ref:
    """Return the custom resource of a part: that of the closest part around it."""
    while path not in of_path:
        path = path[: max(path.rfind("."), path.rfind("["))]
    return of_path[path]


def new_condition(one: CustomObject, problem: str, now: str) -> dict[str, Any] | None:
    """Return the condition Ready of an object, None if it has that already. `now` is a time of RFC 3339."""
    status, reason = ("True", "Applied") if not problem else ("False", "NotApplied")
    before = next((dict(found) for found in one.conditions if found.get("type") == "Ready"), {})
    wanted = {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": problem[:MAX_MESSAGE],
        "observedGeneration": one.generation,
    }
    if {name: before.get(name) for name in wanted} == wanted:
        return None
    changed = before.get("status") != status
    return {**wanted, "lastTransitionTime": now if changed else before.get("lastTransitionTime", now)}


MAX_MESSAGE = 32_768  # of a condition's message in Kubernetes
