"""Exclusive whole-number bounds that llguidance does not keep, in JSON schemas for numbers.

llguidance admits 0 where `exclusiveMinimum` is 0 and the upper bound is less than 1; likewise for every whole number
and, mirrored, for `exclusiveMaximum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_OTHER_SIDE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}


@dataclass(slots=True)
class ExclusiveBounds:
    """Bounds of one schema, with a JSON pointer to each."""

    exclusive: dict[tuple[str, int], str] = field(default_factory=dict)  # by keyword and whole number
    others: dict[str, set[float]] = field(default_factory=dict)  # bounds by keyword

    def note(self, schema: Mapping[str, Any], pointer: str) -> str | None:
        """Note a subschema's bounds; return the pointer of a bound that is not kept beside the others."""
        if schema.get("type") == "integer":
            return None
        bounds: dict[str, float] = {}
        for keyword in (*_OTHER_SIDE["exclusiveMinimum"], *_OTHER_SIDE["exclusiveMaximum"]):
            value = schema.get(keyword)
            if isinstance(value, int | float) and not isinstance(value, bool):
                bounds[keyword] = value
        for name, bound in bounds.items():
            self.others.setdefault(name, set()).add(bound)
        for name, opposite in _OTHER_SIDE.items():
            if name in bounds and float(bounds[name]).is_integer():
                whole = int(bounds[name])
                self.exclusive.setdefault((name, whole), f"{pointer}/{name}")
                if any(_is_within_one(name, whole, bounds[other]) for other in opposite if other in bounds):
                    return f"{pointer}/{name}"
        return None

    def find_unkept(self) -> str | None:
        """Return the pointer of a bound that is not kept if subschemas apply to one value together."""
        for (name, whole), pointer in self.exclusive.items():
            opposite = (bound for other in _OTHER_SIDE[name] for bound in self.others.get(other, ()))
            if any(_is_within_one(name, whole, bound) for bound in opposite):
                return pointer
        return None


def _is_within_one(name: str, whole: int, bound: float) -> bool:
    return 0 < (bound - whole if name == "exclusiveMinimum" else whole - bound) < 1
