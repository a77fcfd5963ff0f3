"""Distinction between answers that follow a response format and calls of a tool.

Where no marker stands before calls, an answer is a call if it reads like one. So a response format can stand beside
tools only if none of its answers reads like a call of one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from moiety_text.tools.argument_types import STRING, ArgumentSchema, resolve_reference
from moiety_text.tools.calls import ARGUMENTS, KNOWN_MEMBERS, NAMES
from moiety_text.tools.deltas import Call
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec

_MAX_DEPTH = 16  # of references and of subschemas that apply to the same value
_OTHER_KIND = "where nothing marks the model's calls, only JSON and choices can stand beside tools"
_LIKE_CALL = (
    "an answer of this format could be read as a call of a tool, which the model writes as JSON too; use a JSON schema "
    "with 'additionalProperties': false and without a property 'name', or with a required property before it"
)


def ambiguity_of(answer: GrammarSpec, way: ToolFormat, offer: ToolOffer, special: Collection[str]) -> str:
    """Return why answers of a grammar cannot be distinguished from calls, as a phrase; "" where they can.

    `special` are the markers of calls that are added tokens.
    """
    if any(marker in way.opener for marker in special):
        return ""
    if answer.kind is GrammarKind.CHOICE:
        choices = msgspec.json.decode(answer.text, type=list[str])
        for choice in choices:
            read = way.reader(offer.names, schemas=offer.schemas).read(choice)
            is_json = not way.opener and choice.startswith(way.to_name[:1])  # begins like a call for the lexer
            if is_json or any(isinstance(part, Call) for part in read):
                return f"the choice {choice[:64]!r} reads like a call of a tool; leave it out"
        return ""
    if answer.kind not in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA):
        return _OTHER_KIND
    if way.opener or way.parameters is not None:
        return ""  # a marker, or calls that are no JSON
    root = {"type": "object"} if answer.kind is GrammarKind.JSON_OBJECT else msgspec.json.decode(answer.text)
    schema, begins_list = ArgumentSchema(root), way.to_name.startswith("[")
    parts = _first_items(schema, root) if begins_list else iter([root])
    return _LIKE_CALL if any(_may_be_call(schema, part, offer.names) for part in parts) else ""


def _first_items(schema: ArgumentSchema, part: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the schemas that the first item of a list may have, if the value may be a list."""
    if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
        yield {}
        return
    if "array" not in schema.types(part):
        return
    if any(keyword in part for keyword in ("$ref", "allOf", "anyOf", "oneOf", "enum", "const")):
        yield {}
        return
    first = part.get("prefixItems")
    yield first[0] if isinstance(first, list) and first else part.get("items", {})


def _may_be_call(schema: ArgumentSchema, part: Any, names: Collection[str], depth: int = 0) -> bool:
    """Return whether a document of a part of the schema could be a call, a JSON object with the name of a tool."""
    if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
        return part is not False
    values = [part["const"]] if "const" in part else part.get("enum")
    if "object" not in schema.types(part):
        return False
    if isinstance(values, list):
        return any(isinstance(value, Mapping) and not set(NAMES).isdisjoint(value) for value in values)
    groups = [[one] for one in _parts(part, "allOf")] + [_parts(part, keyword) for keyword in ("anyOf", "oneOf")]
    if isinstance(reference := part.get("$ref"), str):
        groups.append([resolve_reference(schema.root, reference) or {}])
    may_be = (not group or any(_may_be_call(schema, one, names, depth + 1) for one in group) for group in groups)
    return all(may_be) and _has_members_of_call(schema, part, names)


def _has_members_of_call(schema: ArgumentSchema, part: Mapping[str, Any], names: Collection[str]) -> bool:
    properties, required = part.get("properties"), part.get("required")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    is_closed = part.get("additionalProperties") is False and "patternProperties" not in part

    def is_possible(member: str) -> bool:
        return properties[member] is not False if member in properties else not is_closed

    def may_name_tool(member: str) -> bool:
        return is_possible(member) and (member not in properties or _may_be_name(schema, properties[member], names))

    if not any(map(may_name_tool, NAMES)):
        return False
    if any(
        name in properties and "object" not in schema.types(properties[name]) for name in ARGUMENTS if name in required
    ):
        return False
    others = [name for name in required if name not in KNOWN_MEMBERS]
    first = next(iter(properties), None)
    return not others or (any(map(is_possible, ARGUMENTS)) and first not in others)


def _may_be_name(schema: ArgumentSchema, part: Any, names: Collection[str]) -> bool:
    if STRING not in schema.types(part):
        return False
    values = [part["const"]] if "const" in part else part.get("enum") if isinstance(part, Mapping) else None
    return not isinstance(values, list) or any(value in names for value in values if isinstance(value, str))


def _parts(part: Mapping[str, Any], keyword: str) -> list[Any]:
    found = part.get(keyword)
    return found if isinstance(found, list) else []
