"""JSON schemas with long strings as rules of a grammar, in which the parser counts the characters.

The grammar library makes one lexeme of a string with limits of its length. With long strings an answer would reach the
lexer's limit of states (`chunked_strings`). So the objects, lists and alternatives on the way to a long string are
written as rules here, and every other part of the schema stays a schema in them. A schema where that would change which
documents are allowed stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moiety_engine.structured_outputs.chunked_strings import ChunkedStrings
from moiety_engine.structured_outputs.embedded_schemas import next_schema
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import decode_exactly, encode_exactly
from moiety_engine.structured_outputs.lark_text import lark_string
from moiety_engine.structured_outputs.schema_parts import joined_members, repeated
from moiety_engine.structured_outputs.string_expressions import literal_expression
from moiety_text.tools.argument_types import resolve_reference, types_of_value

MAX_COUNTED_CHARS = 1024  # of all different strings of a schema, which the lexer has enough states for
_OPTIONS = "x-guidance"
_MAX_RULES_BYTES = 1 << 20
_MAX_DEPTH = 64
_DEFINITIONS = ("$defs", "definitions")
_SCALARS = ("null", "boolean", "integer", "number")
_WHITESPACE = r"[\x20\x0A\x0D\x09]+"  # between the parts of a document, where the options say nothing else
_KEYWORDS = frozenset(
    [
        *("$ref", "$dynamicRef", "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "dependentRequired"),
        *("dependentSchemas", "dependencies", "minProperties", "maxProperties", "unevaluatedProperties"),
        *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
        *("minItems", "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "contentEncoding"),
        *("contentMediaType", "contentSchema", "$anchor", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    ]
)


class _NotWrittenError(Exception):
    """The schema cannot be written as rules that allow the same documents."""


def with_long_strings(grammar: str) -> str:
    """Return a grammar of the library in which the schemas with long strings are rules, if there are any."""
    if "Length" not in grammar:
        return grammar
    if grammar.lstrip()[:1] != "{":
        rules, others = _with_rules(grammar, 0)
        grammars = [{"name": "main", "lark_grammar": rules}, *others]
        return encode_exactly({"grammars": grammars}) if others else grammar
    decoded = decode_exactly(grammar)
    found, others = [], []
    for one in decoded["grammars"]:
        if one.get("lark_grammar"):
            text, more = _with_rules(one["lark_grammar"], len(others))
            found.append({**one, "lark_grammar": text})
            others += more
        else:
            schema_rules = rules_of_schema(one.get("json_schema"))
            found.append(one if schema_rules is None else {"name": one["name"], "lark_grammar": schema_rules})
    grammars = [*found, *others]
    return encode_exactly({**decoded, "grammars": grammars}) if grammars != decoded["grammars"] else grammar


def _with_rules(lark: str, num_others: int) -> tuple[str, list[dict[str, Any]]]:
    """Return rules that refer to grammars in place of schemas with long strings, and these grammars."""
    others: list[dict[str, Any]] = []
    parts, end = [], 0
    while found := next_schema(lark, end):
        try:
            _, stop = json.JSONDecoder().raw_decode(lark, found.end())
            schema_rules = rules_of_schema(decode_exactly(lark[found.end() : stop]))
        except ValueError:
            break  # the library refuses it with the reason
        parts.append(lark[end : found.start()])
        if schema_rules is None:
            parts.append(lark[found.start() : stop])
        else:
            others.append({"name": f"long_strings_{num_others + len(others)}", "lark_grammar": schema_rules})
            parts += [f"@{others[-1]['name']} ", "\n" * lark.count("\n", found.start(), stop)]
        end = stop
    return "".join([*parts, lark[end:]]), others


def rules_of_schema(schema: Any) -> str | None:
    """Return the rules of an exact schema with the library's options; None where it stays a schema."""
    if not isinstance(schema, Mapping):
        return None
    limits = {limits for part in _parts(schema) if (limits := _length_limits(part)) is not None}
    if sum(max(least, most or 0) for least, most in limits) <= MAX_COUNTED_CHARS:
        return None
    writing = _SchemaRules(schema, len(limits))
    try:
        start = writing.value(schema)
        rules = "\n".join(["%llguidance {}", f"start: {start}", *writing.rules()])
    except (_NotWrittenError, GrammarRefused, RecursionError):
        return None
    return rules if len(rules) <= _MAX_RULES_BYTES else None


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
            waiting += [value for key, value in one.items() if key not in ("const", "enum")]
        elif isinstance(one, list):
            waiting += one


def _length_limits(part: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """Return the limits of a string that has them; None for other schemas."""
    least, most = part.get("minLength", 0), part.get("maxLength")
    if not _is_count(least) or not (most is None or _is_count(most)) or (least == 0 and most is None):
        return None
    return int(least), None if most is None else int(most)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _SchemaRules:
    """Rules of one schema."""

    def __init__(self, root: Mapping[str, Any], num_limits: int) -> None:
        self._root, self._options = root, root.get(_OPTIONS, {})
        escapes = self._options.get("json_allowed_escapes")
        self._strings = ChunkedStrings(num_limits, has_control_escapes=escapes is None or "u" in escapes)
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules, by their text or reference
        self._depth = 0
        whitespace = self._options.get("whitespace_pattern", _WHITESPACE)
        self._space = f"{self._lexeme(f'/{whitespace}/')}?"
        self._comma = f'{self._space} ","'

    def rules(self) -> list[str]:
        """Return the rules that the values refer to."""
        return [*self._rules, *self._strings.rules()]

    def value(self, part: Any) -> str:
        """Return the name of the rule of a value. Raises _NotWrittenError and GrammarRefused."""
        if not self._has_long(part):
            return self._kept(part)
        self._depth += 1
        if self._depth > _MAX_DEPTH or not isinstance(part, Mapping):
            raise _NotWrittenError
        keywords = _KEYWORDS.intersection(part)
        if "$ref" in keywords:
            found = self._referred(part, keywords)
        elif keywords == {"allOf"} and isinstance(part["allOf"], list) and len(part["allOf"]) == 1:
            found = self.value(part["allOf"][0])
        elif len(keywords) == 1 and keywords <= {"anyOf", "oneOf"}:
            parts = part[keyword := next(iter(keywords))]
            self._check_alternatives(parts, is_exclusive=keyword == "oneOf")
            found = self._named(" | ".join(self.value(one) for one in parts))
        else:
            found = self._typed(part, keywords)
        self._depth -= 1
        return found

    def _typed(self, part: Mapping[str, Any], keywords: frozenset[str]) -> str:
        kind = part.get("type")
        if kind == "object" and keywords <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(part)
        if kind == "array" and keywords <= {"type", "items", "prefixItems", "minItems", "maxItems"}:
            return self._array(part)
        types, limits = [kind] if isinstance(kind, str) else kind, _length_limits(part)
        if not isinstance(types, list) or limits is None or not keywords <= {"type", "minLength", "maxLength"}:
            raise _NotWrittenError
        if "string" not in types or not {*types} <= {"string", *_SCALARS}:
            raise _NotWrittenError
        least, most = limits
        if most is not None and most < least:
            raise _NotWrittenError  # the library refuses it with the reason
        text = self._strings.string(least, most)
        if others := [one for one in types if one != "string"]:
            text += f" | {self._kept({'type': others})}"
        return self._named(text)

    def _referred(self, part: Mapping[str, Any], keywords: frozenset[str]) -> str:
        reference = part["$ref"]
        target = _definition(self._root, reference)
        if keywords != {"$ref"} or target is None:
            raise _NotWrittenError
        if reference not in self._names:
            name = self._names[reference] = f"value_{len(self._names)}"
            self._rules.append(f"{name}: {self.value(target)}")
        return self._names[reference]

    def _object(self, part: Mapping[str, Any]) -> str:
        properties, required = part.get("properties", {}), part.get("required", [])
        if (
            not isinstance(properties, Mapping)
            or not isinstance(required, list)
            or any(one not in [*properties] for one in required)
        ):
            raise _NotWrittenError
        members = [
            (f"{self._space} {lark_string(_quoted(name))} {self._member_value(one)}", name in required)
            for name, one in properties.items()
        ]
        free = part.get("additionalProperties", True)
        if free is not False:
            names = "|".join(literal_expression(_quoted(name)) for name in properties)
            lexeme = self._lexeme(f'/"{self._strings.character}*"/{f" & ~/{names}/" if names else ""}')
            member = f"{self._space} {lexeme} {self._member_value(free)}"
            members.append((f"{member} ({self._comma} {member})*", False))
        rules, first = joined_members(f"m{len(self._names)}", members, self._comma)
        self._rules += rules
        return self._named(f'"{{" ({first}) {self._space} "}}"')

    def _array(self, part: Mapping[str, Any]) -> str:
        starts, items = part.get("prefixItems", []), part.get("items", True)
        if not isinstance(starts, list) or isinstance(items, list):
            raise _NotWrittenError
        item = None if items is False else f"{self._space} {self.value(items)}"
        inner = repeated(item, part, self._comma, [f"{self._space} {self.value(one)}" for one in starts])
        return self._named(f'"[" {inner} {self._space} "]"')

    def _member_value(self, part: Any) -> str:
        return f'{self._space} ":" {self._space} {self.value(part)}'

    def _kept(self, part: Any) -> str:
        """Return the rule of a part that stays a schema."""
        found = {key: value for key, value in part.items() if key in _KEYWORDS} if isinstance(part, Mapping) else part
        if found is False:
            raise _NotWrittenError
        found = {} if found is True else found
        found = {**self._definitions_of(found), **found} if isinstance(found, Mapping) else found
        if "$schema" in self._root:
            found = {"$schema": self._root["$schema"], **found}
        return self._named(f"%json {encode_exactly({**found, _OPTIONS: self._options})}")

    def _definitions_of(self, part: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the definitions that a part refers to, also through others. Raises _NotWrittenError."""
        found: dict[str, dict[str, Any]] = {}
        waiting: list[Any] = [part]
        while waiting:
            for one in _parts(waiting.pop()):
                reference = one.get("$ref")
                if not isinstance(reference, str):
                    continue
                if _definition(self._root, reference) is None:
                    raise _NotWrittenError
                section, name = reference.split("/")[1:3]
                name = name.replace("~1", "/").replace("~0", "~")
                if name not in found.setdefault(section, {}):
                    found[section][name] = self._root[section][name]
                    waiting.append(found[section][name])
        return found

    def _named(self, text: str) -> str:
        """Return the name of the rule with this text, which is added if it is new."""
        if text not in self._names:
            self._names[text] = f"value_{len(self._names)}"
            self._rules.append(f"{self._names[text]}: {text}")
        return self._names[text]

    def _lexeme(self, expression: str) -> str:
        if expression not in self._names:
            self._names[expression] = f"LEXEME_{len(self._names)}"
            self._rules.append(f"{self._names[expression]}: {expression}")
        return self._names[expression]

    def _has_long(self, part: Any) -> bool:
        """Return whether a value may have a string whose characters are counted in chunks."""
        seen: set[int] = set()
        waiting = [part]
        while waiting:
            for one in _parts(waiting.pop()):
                if id(one) in seen:
                    continue
                seen.add(id(one))
                limits = _length_limits(one)
                if limits is not None and max(limits[0], limits[1] or 0) > self._strings.chunk_chars:
                    return True
                if isinstance(reference := one.get("$ref"), str):
                    waiting.append(resolve_reference(self._root, reference))
        return False

    def _check_alternatives(self, parts: Any, *, is_exclusive: bool) -> None:
        """Check that a lexeme of one alternative cannot hide one of another. Raises _NotWrittenError.

        The lexer takes the longest lexeme: another string would hide the first chunk of a long one. So either the types
        of all alternatives differ, or their first member tells them apart.
        """
        if not isinstance(parts, list) or not parts:
            raise _NotWrittenError
        types: set[str] = set()
        first_members: list[tuple[str, frozenset[str]]] = []
        for one in parts:
            found = self._types(one)
            if found == {"object"} and (member := self._first_member(one)) is not None:
                if any(name == member[0] and values & member[1] for name, values in first_members):
                    raise _NotWrittenError
                first_members.append(member)
                found = {f"object {len(first_members)}"}
            elif found == {"string"} and not is_exclusive and self._is_short_list(one):
                continue
            if found & types:
                raise _NotWrittenError
            types |= found
        if first_members and "object" in types:
            raise _NotWrittenError

    def _types(self, part: Any) -> set[str]:
        for _ in range(_MAX_DEPTH):
            if not isinstance(part, Mapping):
                break
            kind = part.get("type")
            if isinstance(kind, str | list):
                return {"number" if one == "integer" else one for one in ([kind] if isinstance(kind, str) else kind)}
            if "const" in part or "enum" in part:
                values = part["enum"] if "enum" in part else [part["const"]]
                return {kind for one in values for kind in types_of_value(one)} - {"integer"}
            part = resolve_reference(self._root, part["$ref"]) if isinstance(part.get("$ref"), str) else None
        raise _NotWrittenError

    def _is_short_list(self, part: Mapping[str, Any]) -> bool:
        values = part["enum"] if isinstance(part.get("enum"), list) else [part.get("const")]
        return all(isinstance(one, str) and len(msgspec.json.encode(one)) < self._strings.chunk_chars for one in values)

    def _first_member(self, part: Any) -> tuple[str, frozenset[str]] | None:
        """Return the first member of an object and the strings it may be, if it is required and has such ones."""
        while isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
            part = resolve_reference(self._root, part["$ref"])
        properties = part.get("properties") if isinstance(part, Mapping) else None
        if not isinstance(properties, Mapping) or not properties:
            return None
        name, value = next(iter(properties.items()))
        if name not in part.get("required", ()) or not isinstance(value, Mapping):
            return None
        values = value["enum"] if isinstance(value.get("enum"), list) else [value.get("const")]
        strings = frozenset(one for one in values if isinstance(one, str))
        return (name, strings) if len(strings) == len(values) else None


def _definition(root: Mapping[str, Any], reference: Any) -> Any:
    """Return the target of a reference to a definition; None for others."""
    if not isinstance(reference, str) or not reference.startswith(tuple(f"#/{one}/" for one in _DEFINITIONS)):
        return None
    return resolve_reference(root, reference)


def _quoted(name: str) -> str:
    return msgspec.json.encode(name).decode()
