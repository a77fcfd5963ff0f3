"""Generator of the engine options in the chart's schema: `python helm/write_schema.py`. A test compares them."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

from moiety_options.declaration import DeclaredOption, declared_options
from moiety_options.engine_options import EngineOptions

SCHEMA = Path(__file__).parent / "moiety" / "values.schema.json"
DEFINITION = "engineOptions"
SIZE = r"^[0-9]+(\.[0-9]+)? *([KMGTkmgt]i?)?[Bb]?$"
JSON_TYPES = {int: "integer", float: "number", bool: "boolean"}


def schema() -> dict[str, Any]:
    """Return the chart's schema, with the engine's options as they are declared."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return {**found, "$defs": {**found["$defs"], DEFINITION: engine_options()}}


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
