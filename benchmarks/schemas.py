"""Generator of JSON schemas like those in public use.

They have nested records, references, enums, formats, patterns and alternatives. They are drawn from a seed, without a
network.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = (
    *("id", "name", "title", "email", "createdAt", "status", "tags", "address", "price", "quantity", "owner", "notes"),
    *("url", "kind", "items", "city", "zip-code", "enabled", "score", "parent", "children", "größe", "first name"),
)
WORDS = ("draft", "active", "archived", "high", "low", "EUR", "USD", "Zürich", 'say "hi"', "back\\slash", "näher", "")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "duration")
PATTERNS = (
    "^[A-Z]{2,4}-[0-9]{3,6}$",
    "^\\+?[0-9]{7,12}$",
    "^#([0-9a-f]{3}|[0-9a-f]{6})$",
    "^v[0-9]+\\.[0-9]+(\\.[0-9]+)?$",
    "^(GET|POST|PUT) /[a-z/]{1,20}$",
    "^[^\\s@]{1,9}@[a-z]{1,9}\\.(com|org)$",
)
MAX_DEPTH = 4


class SchemaMaker:
    """Generator of a sequence of schemas; the seed determines the keywords that it uses."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._defs: dict[str, Schema] = {}

    def make(self) -> Schema:
        draw = self._draw
        self._defs = {}
        kinds = [name for name in ("thing", "place", "person") if draw.random() < 0.4]
        for name in kinds:
            self._defs[name] = self._object(2)
        if kinds and draw.random() < 0.3:  # a record that may hold others of its kind
            name = draw.choice(kinds)
            self._defs[name]["properties"]["next"] = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
        schema = self._object(0) if draw.random() < 0.9 else self._array(0)
        if self._defs:
            schema["$defs"] = self._defs
        if draw.random() < 0.3:
            schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Record", "description": "A"}
        return schema

    def _any(self, depth: int) -> Schema:
        makers: list[Callable[[int], Schema]] = [self._string, self._string, self._number, self._enum, self._simple]
        if depth < MAX_DEPTH:
            makers += [self._object, self._array, self._either, self._map]
            if self._defs:
                makers += [self._ref, self._ref]
        return self._draw.choice(makers)(depth)

    def _object(self, depth: int) -> Schema:
        draw = self._draw
        names = draw.sample(NAMES, draw.randint(1, 6 - depth))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth + 1) for name in names}}
        required = [name for name in names if draw.random() < 0.7]
        if required:
            schema["required"] = required
        if draw.random() < 0.7:
            schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> Schema:
        draw = self._draw
        schema: Schema = {"type": "array", "items": self._any(depth + 1)}
        if draw.random() < 0.5:
            schema["minItems"] = draw.randint(0, 2)
        if draw.random() < 0.7:
            schema["maxItems"] = draw.randint(2, 4)
        if draw.random() < 0.2:
            schema["prefixItems"] = [self._simple(depth), self._number(depth)]
        return schema

    def _string(self, depth: int) -> Schema:
        draw = self._draw
        match draw.randint(0, 3):
            case 0:
                return {"type": "string", "format": draw.choice(FORMATS)}
            case 1:
                return {"type": "string", "pattern": draw.choice(PATTERNS)}
            case 2:
                return {"type": "string", "minLength": draw.randint(0, 2), "maxLength": draw.randint(3, 20)}
        return {"type": "string"}

    def _number(self, depth: int) -> Schema:
        draw = self._draw
        schema: Schema = {"type": draw.choice(("integer", "number"))}
        if draw.random() < 0.5:
            schema["minimum"] = draw.choice((-100, 0, 1))
        if draw.random() < 0.5:
            schema[draw.choice(("maximum", "exclusiveMaximum"))] = draw.choice((10, 255, 1_000_000))
        if schema["type"] == "integer" and draw.random() < 0.15:
            schema["multipleOf"] = draw.choice((2, 5))
        return schema

    def _enum(self, depth: int) -> Schema:
        draw = self._draw
        if draw.random() < 0.2:
            return {"const": draw.choice((*WORDS, 7, True, None))}
        if draw.random() < 0.2:
            return {"enum": draw.sample([1, 2.5, None, True, "one", [1, 2], {"a": 1}], 3)}
        return {"type": "string", "enum": draw.sample(WORDS, draw.randint(1, 6))}

    def _simple(self, depth: int) -> Schema:
        return self._draw.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}))

    def _either(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth + 1) for _ in range(self._draw.randint(2, 3))]}

    def _map(self, depth: int) -> Schema:
        return {"type": "object", "additionalProperties": self._any(depth + 1)}

    def _ref(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._draw.choice(sorted(self._defs))}"}
