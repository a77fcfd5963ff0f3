"""Parts of grammars that follow a JSON schema: members in their order, lists of some items, and places of refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.argument_rules import unsupported
from moiety_engine.structured_outputs.errors import GrammarRefused

MAX_ITEMS = 4096  # that a schema may demand or allow by number


def at_place(place: str, make: Callable[..., str], *arguments: Any) -> str:
    """Return what `make` returns; a refusal within has the place before it. Raises GrammarRefused."""
    try:
        return make(*arguments)
    except GrammarRefused as exc:
        raise GrammarRefused(f"{place}{exc}") from exc


def joined_members(name: str, parts: Sequence[tuple[str, bool]], comma: str) -> tuple[list[str], str]:
    """Return the rules of parts in their order, with a comma between those that are there, and the text of the first.

    Each part comes with whether it is required. `name` is part of the rules' names.
    """
    rules: list[str] = []
    first, after = '""', '""'  # of the parts from one on: without and with a part before them
    for at in reversed(range(len(parts))):
        part, is_required = parts[at]
        rules += [f"first_{name}_{at}: {first}", f"after_{name}_{at}: {after}"]
        then, later = f"first_{name}_{at}", f"after_{name}_{at}"
        first = f"{part} {later}" if is_required else f"{part} {later} | {then}"
        after = f"{comma} {part} {later}" if is_required else f"({comma} {part})? {later}"
    return rules, first


def properties_of(part: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """Return the properties of an object's schema, and the schema of all others. Raises GrammarRefused."""
    properties, required = part.get("properties", {}), part.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise GrammarRefused(": 'properties' must be an object and 'required' a list")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise GrammarRefused(f"/required: {name!r} is not among the properties; add it there")
    return properties, part.get("additionalProperties", True)


def repeated(item: str | None, part: Mapping[str, Any], comma: str, starts: Sequence[str] = ()) -> str:
    """Return the rule of as many items as a list's schema allows. Raises GrammarRefused.

    `starts` are the rules of the first items, and `item` that of the others; None where there are no others.
    """
    least, most = part.get("minItems", 0), part.get("maxItems")
    for keyword, count in (("minItems", least), ("maxItems", most)):
        if count is not None and not (isinstance(count, int | float) and count == int(count) and count >= 0):
            raise GrammarRefused(f"/{keyword}: it must be an integer of at least 0")
        if count is not None and count > MAX_ITEMS:
            raise GrammarRefused(f"/{keyword}: {unsupported(keyword)}")
    if item is None:
        most = min(len(starts), len(starts) if most is None else most)
    if most is not None and most < least:
        raise GrammarRefused("/minItems: a list of so many items is not allowed")
    if most is not None:
        starts = starts[: int(most)]
    if item is not None and not starts and most != 0:
        starts = [item]  # the first one, which has no comma before it
    text, num_starts = "", len(starts)
    if item is not None and (most is None or most > num_starts):
        text = f"({comma} {item}){{{max(int(least) - num_starts, 0)},{'' if most is None else int(most) - num_starts}}}"
    for at in reversed(range(num_starts)):
        text = f"{comma if at else ''} {starts[at]} {text}"
        text = text if at < least else f"({text})?"
    return text
