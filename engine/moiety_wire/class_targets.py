"""Files of service classes: changes of the built-in ones and additions, or what `moiety class list --json` prints."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from moiety_wire.classes import SHIPPED, ServiceClass

_FIELDS = frozenset(ServiceClass.__struct_fields__)


class BadClassTargets(ValueError):
    """The file has no valid classes; the message names the file and the class."""


def read_classes(path: Path) -> tuple[ServiceClass, ...]:
    """Return the built-in classes with the changes and additions of a file.

    The file is TOML with a table per class, or .json with an object per class; only JSON can remove a target, by null.
    JSON can also be the list of a gateway's classes. Raises BadClassTargets.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        tables = _tables(content)
    except (OSError, ValueError) as exc:
        raise BadClassTargets(f"cannot read the classes from {path}: {exc}") from exc
    classes = {service.name: service for service in SHIPPED}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BadClassTargets(f"{path}: {name} must be a table of a class's settings, such as [{name}]")
        if unknown := set(table) - _FIELDS:
            raise BadClassTargets(f"{path}: class {name} has no setting {', '.join(sorted(unknown))}")
        start = msgspec.to_builtins(classes[name]) if name in classes else {}
        try:
            service = msgspec.convert(start | table | {"name": name}, ServiceClass)
        except msgspec.ValidationError as exc:
            raise BadClassTargets(f"{path}: class {name}: {exc}") from exc
        if complaint := service.complaint():
            raise BadClassTargets(f"{path}: class {name}: {complaint}")
        classes[name] = service
    return tuple(classes.values())


def _tables(content: Any) -> Mapping[str, Any]:
    """Return the settings by class. A gateway's list has further settings, which are prices."""
    listed = content["data"] if isinstance(content, dict) and isinstance(content.get("data"), list) else content
    if isinstance(listed, list):
        if not all(isinstance(row, dict) and isinstance(row.get("name"), str) for row in listed):
            raise ValueError("each entry of the list must be a class with a name")
        return {row["name"]: {name: row[name] for name in row.keys() & _FIELDS} for row in listed}
    if not isinstance(listed, dict):
        raise ValueError("it is neither an object nor a list")
    return listed
