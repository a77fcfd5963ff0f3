"""Copies of fields between types that name them alike."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Generic, Self, TypeVar

import msgspec

Source = TypeVar("Source")
Target = TypeVar("Target")


def copy_fields(source: object, target: type[Target], **others: Any) -> Target:
    """Return a new `target`, a struct or a dataclass: the fields in `others`, and the rest from `source`.

    Raises AttributeError where `source` has no attribute of a field's name.
    """
    names = field_names(target)
    return target(**{name: getattr(source, name) for name in names if name not in others}, **others)


def field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a struct or a dataclass, in their order."""
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return tuple(field.name for field in fields(kind))


class CopyOf(Generic[Source]):
    """Base of a struct or a dataclass whose fields are those of a `Source` with the same names."""

    __slots__ = ()

    @classmethod
    def of(cls, source: Source) -> Self:
        """Return a copy of the fields. Raises AttributeError where `source` lacks one."""
        return copy_fields(source, cls)
