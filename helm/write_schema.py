"""Generator of declared parts of the chart's schema: `python helm/write_schema.py`. A test compares them.

These are the engine's options, the settings of the gateway and the trace store, and the values of pods, which every
component accepts. The rest of the schema is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from moiety_options.declaration import DeclaredOption, declared_options
from moiety_options.engine_options import EngineOptions
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

SCHEMA = Path(__file__).parent / "moiety" / "values.schema.json"
SIZE = r"^[0-9]+(\.[0-9]+)? *([KMGTkmgt]i?)?[Bb]?$"
JSON_TYPES = {int: "integer", float: "number", bool: "boolean"}


PODS = "podDefaults"
COMPONENTS = (
    ("gateway",), ("dashboard",), ("traces",), ("jobs",), ("database", "bundled"), ("inferencePool", "picker"),
    ("enginePoolDefaults",),
)  # fmt: skip
NOT_OF_A_POOL = ("serviceAccountAnnotations",)  # all pools have one service account
IN_TEXT = ("array", "object")  # types that a setting also accepts as text, as in an environment variable
NOT_IN_THE_CHART = ("title", "default", "reload", "format", "writeOnly")


def schema() -> dict[str, Any]:
    """Return the chart's schema, with the options, settings and values of pods as they are declared."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    declared = {
        "engineOptions": engine_options(),
        "gatewaySettings": settings(GatewaySettings),
        "traceSettings": settings(TraceSettings),
    }
    found["$defs"] |= declared
    properties = found["properties"]
    for path in COMPONENTS:
        component = properties[path[0]]
        for name in path[1:]:
            component = component["properties"][name]
        component["properties"] |= references((PODS,), properties[PODS]["properties"])
    defaults = properties["enginePoolDefaults"]["properties"]
    of_a_pool = {name: one for name, one in defaults.items() if name not in NOT_OF_A_POOL}
    properties["engines"]["items"]["properties"] |= references(("enginePoolDefaults",), of_a_pool)
    return found


def references(path: tuple[str, ...], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return references to properties below `path`."""
    return {name: {"$ref": f"#/properties/{'/properties/'.join((*path, name))}"} for name in properties}


def settings(model: type[BaseSettings]) -> dict[str, Any]:
    """Return the schema of a process' settings, including those that the chart sets, which a template refuses."""
    declared = model.model_json_schema()
    enums = declared.get("$defs", {})
    properties = {name: _setting(one, enums) for name, one in declared["properties"].items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _setting(declared: Mapping[str, Any], enums: Mapping[str, Any]) -> dict[str, Any]:
    found = deepcopy(dict(declared))
    if "$ref" in found:
        found |= {"enum": enums[found.pop("$ref").rpartition("/")[2]]["enum"]}
    if found.get("type") in IN_TEXT:
        found["type"] = [found["type"], "string"]
    for one in (found, *found.get("anyOf", ())):
        for name in NOT_IN_THE_CHART:
            one.pop(name, None)
    return found


def engine_options() -> dict[str, Any]:
    """Return the schema of `options` of a pool of Moiety's engines, including those that the chart sets itself.

    A template refuses the latter, with a sentence that says what to set instead.
    """
    options = declared_options(EngineOptions).values()
    properties = {one.flag.removeprefix("--"): _property(one) for one in options}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(one: DeclaredOption) -> dict[str, Any]:
    told = {"description": one.option.help}
    if one.option.is_size:
        return {"type": ["integer", "string"], "minimum": 0, "pattern": SIZE, **told}
    if issubclass(one.type, Enum):
        return {"enum": [choice.value for choice in one.type], **told}
    bounds = {"minimum": one.option.min, "maximum": one.option.max}
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    return {"type": JSON_TYPES.get(one.type, "string"), **limits, **told}


def written(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(written(schema()), encoding="utf-8")
