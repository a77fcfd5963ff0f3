"""Types of arguments that a model writes as text, from the JSON schema of their tool.

Formats with a tag for each parameter do not show whether `5` is a number or a string; the schema says it.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeGuard

from moiety_text.tools.json_scanner import MAX_NUMBER_LENGTH, NUMBER, JsonScanner, scan_whole
from moiety_text.tools.python_values import json_of_python
from moiety_text.tools.scanning import SPACE

STRING = "string"
ANY_TYPE = frozenset(["string", "number", "integer", "boolean", "null", "array", "object"])
_NAMES: Mapping[type, tuple[str, ...]] = {
    **{bool: ("boolean",), type(None): ("null",), str: (STRING,), list: ("array",)},
    **{int: ("integer", "number"), float: ("integer", "number")},
    Decimal: ("integer", "number"),
}
_MAX_PARTS = 1024  # of a schema that are searched for a member or an item
_MAX_DEPTH = 16  # of references and of subschemas that apply to the same value
_JSON_WORDS = ("true", "false", "null")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # as Python's templates print them

Schema = Mapping[str, Any]


class ArgumentSchema:
    """The JSON schema of one tool's arguments, of which a bounded number of parts is read at a time."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._types: dict[int, frozenset[str]] = {}  # by the identity of a subschema
        self._parameters: dict[str, Any] = {}

    def parameter(self, name: str) -> Any:
        """Return the schema of one parameter; {} where the schema does not say it."""
        if name not in self._parameters:
            self._parameters[name] = self.member(self.root, name)
        return self._parameters[name]

    def member(self, schema: Any, name: str) -> Any:
        """Return the schema of one member of an object with this schema; {} where it does not say it."""
        for part in self._applying(schema):
            properties, more = part.get("properties"), part.get("additionalProperties")
            if isinstance(properties, Mapping) and name in properties:
                return properties[name]
            if isinstance(more, Mapping):
                return more
        return {}

    def item(self, schema: Any, index: int) -> Any:
        """Return the schema of one item of a list with this schema; {} where it does not say it."""
        for part in self._applying(schema):
            first, items = part.get("prefixItems"), part.get("items")
            if _is_list(first) and index < len(first):
                return first[index]
            if isinstance(items, Mapping):
                return items
        return {}

    def types(self, schema: Any) -> frozenset[str]:
        """Return the JSON types that a part of the schema allows."""
        return self._types_of(schema, 0)

    def parameter_types(self, name: str) -> frozenset[str]:
        return self.types(self.parameter(name))

    def _applying(self, schema: Any) -> Iterator[Schema]:
        """Yield the schema and the subschemas that apply to the same value, or may, up to a number; each once."""
        waiting, seen = deque([schema]), set[int]()
        while waiting and len(seen) < _MAX_PARTS:
            part = waiting.popleft()
            if isinstance(part, Mapping) and id(part) not in seen:
                seen.add(id(part))
                yield part
                waiting += self._parts(part)

    def _parts(self, schema: Schema) -> Iterator[Any]:
        """Yield the subschemas that apply to the same value, or may."""
        if isinstance(reference := schema.get("$ref"), str):
            yield resolve_reference(self.root, reference)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if _is_list(parts := schema.get(keyword)):
                yield from parts

    def _types_of(self, schema: Any, depth: int) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ANY_TYPE
        known = self._types.get(id(schema))
        if known is None:
            self._types[id(schema)] = ANY_TYPE  # where the schema refers to itself
            known = self._types[id(schema)] = self._find_types(schema, depth)
        return known

    def _find_types(self, schema: Schema, depth: int) -> frozenset[str]:
        found, named = ANY_TYPE, schema.get("type")
        if isinstance(named, str):
            found &= _widened([named])
        elif _is_list(named):
            found &= _widened([one for one in named if isinstance(one, str)])
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if _is_list(values):
            found &= frozenset(type_name for value in values for type_name in types_of_value(value))
        if isinstance(reference := schema.get("$ref"), str):
            found &= self._types_of(resolve_reference(self.root, reference), depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if _is_list(parts := schema.get(keyword)) and parts:
                found &= frozenset().union(*(self._types_of(part, depth + 1) for part in parts))
        if _is_list(parts := schema.get("allOf")):
            for part in parts:
                found &= self._types_of(part, depth + 1)
        return found


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def resolve_reference(root: Any, reference: str) -> Any:
    """Return the target of a reference within the schema; None where there is none."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def _widened(names: Sequence[str]) -> frozenset[str]:
    return frozenset([*names, *(["integer"] if "number" in names else [])])


def types_of_value(value: Any) -> tuple[str, ...]:
    """Return the types that a value of JSON has: a whole number is an integer and a number."""
    if isinstance(value, float) and not value.is_integer():
        return ("number",)
    if isinstance(value, Decimal) and value != value.to_integral_value():
        return ("number",)
    return _NAMES.get(type(value), ("object",))


def typed_argument(text: str, types: frozenset[str]) -> str:
    """Return an argument that a model has written as text, as JSON.

    What is not of one of the types is a string: it is what the model has written.
    """
    if types != {STRING}:
        stripped = text.strip(SPACE)
        found = json_of_plain(stripped)
        if stripped == "None" and "null" in types and types != ANY_TYPE:
            found = "null"  # templates print it in this way
        if found is None and STRING not in types:
            found = _WORDS.get(stripped.lower()) or json_of_python(stripped)
        if found is not None and _is_of(found, types):
            return found
    return json.dumps(text, ensure_ascii=False)


def json_of_plain(text: str) -> str | None:
    """Return a JSON value that is not a string, as valid JSON; None for any other text."""
    if text in _JSON_WORDS:
        return text
    if text[:1] in ("{", "["):
        return scan_whole(JsonScanner(), text)
    is_number = len(text) <= MAX_NUMBER_LENGTH and NUMBER.fullmatch(text) and math.isfinite(float(text))
    return text if is_number else None


def _is_of(found: str, types: frozenset[str]) -> bool:
    match found[0]:
        case "{":
            return "object" in types
        case "[":
            return "array" in types
        case "t" | "f":
            return "boolean" in types
        case "n":
            return "null" in types
    return "number" in types or ("integer" in types and (found.lstrip("-").isdigit() or float(found).is_integer()))
