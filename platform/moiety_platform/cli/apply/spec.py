"""Conversion of a declaration file to a flat list of objects with the fields that the file gives."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from moiety_platform.cli.apply.document import ROOT, Document, FileError
from moiety_platform.cli.apply.kinds import apply_kinds
from moiety_platform.cli.errors import CommandError
from moiety_platform.resources.apply_kind import ApplyKind, DeclaredObject, Entry, InvalidEntry, ObjectPlace

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


def top_parts() -> dict[str, ApplyKind]:
    """Return the kinds of the lists at the top of a file, by the names of these lists."""
    return {kind.part: kind for kind in apply_kinds().values() if not kind.within}


def read_declared_objects(document: Document) -> list[DeclaredObject]:
    """Return all objects of the file, parents before children. Raises CommandError that lists all errors."""
    parts = top_parts()
    if not isinstance(document.data, dict):
        raise document.error(ROOT, f"must hold lists at the top: {', '.join(parts)}")
    wrong = [
        document.error(f"{ROOT}.{part}", f"is not known; {_suggest(part, list(parts))}")
        for part in document.data
        if part not in parts
    ]
    found: dict[ObjectPlace, DeclaredObject] = {}
    for part, kind in parts.items():
        try:
            for declared in _parse_part(document, part, kind, wrong):
                if declared.place in found:
                    first = document.line(found[declared.place].path)
                    message = f"the {declared.kind} {declared.name!r} stands on line {first} already; take one away"
                    wrong.append(document.error(declared.path, message))
                found[declared.place] = declared
        except FileError as exc:
            wrong.append(exc)
    if wrong:
        raise CommandError("\n".join(map(str, wrong)))
    return list(found.values())


def _parse_part(document: Document, part: str, kind: ApplyKind, wrong: list[FileError]) -> Iterator[DeclaredObject]:
    entries = document.data.get(part) or []
    if not isinstance(entries, list):
        raise document.error(f"{ROOT}.{part}", "must be a list, each entry after a dash")
    for number, raw in enumerate(entries):
        path = f"{ROOT}.{part}[{number}]"
        try:
            yield from _objects(kind, Entry(path, raw, _convert(document, raw, form_of(kind.kind), path)))
        except FileError as exc:
            wrong.append(exc)
        except InvalidEntry as exc:
            wrong.append(document.error(exc.path, str(exc)))


def _objects(kind: ApplyKind, entry: Entry) -> Iterator[DeclaredObject]:
    """Yield the objects of an entry, and of the entries in it."""
    objects = list(kind.objects(entry))
    yield from objects
    for inner in _inner_kinds(kind.kind):
        (parent,) = objects
        raw: Any = entry.raw.get(inner.part)
        form = getattr(entry.form, inner.part)
        path, around = f"{entry.path}.{inner.part}", (*entry.around, entry.form)
        entries = (
            [(f"{path}[{number}]", raw[number], one) for number, one in enumerate(form)]
            if inner.is_list
            else [(path, raw or {}, form)]
        )
        for place, given, parsed in entries:
            yield from _objects(inner, Entry(place, given, parsed, parent, around))


def _inner_kinds(kind: str) -> list[ApplyKind]:
    """Return the kinds whose entries are in those of this kind; parts that are one entry come first."""
    return sorted((one for one in apply_kinds().values() if kind in one.within), key=lambda one: one.is_list)


@cache
def form_of(kind: str) -> type[msgspec.Struct]:
    """Return the fields of an entry: those of the kind itself, and the parts that other kinds have in it."""
    own = apply_kinds()[kind].form
    parts: list[Any] = [
        (one.part, list[form_of(one.kind)], msgspec.field(default_factory=list))  # type: ignore[misc]
        if one.is_list
        else (one.part, form_of(one.kind), form_of(one.kind)())
        for one in _inner_kinds(kind)
    ]
    if not parts:
        return own
    return msgspec.defstruct(own.__name__, parts, bases=(own,), frozen=True, forbid_unknown_fields=True)


def _convert(document: Document, raw: Any, form: type[T], path: str) -> T:
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as exc:
        message, _, inner = str(exc).partition(" - at `$")
        place = path + inner.rstrip("`")
        if unknown := _UNKNOWN.fullmatch(message):
            name = unknown[1]
            raise document.error(f"{place}.{name}", f"is not known; {_suggest(name, _known(form, inner))}") from exc
        raise document.error(place, f"{message[:1].lower()}{message[1:]}") from exc


def _known(form: Any, inner: str) -> list[str]:
    """Return the fields of the struct at this path inside `form`."""
    for name in re.findall(r"\.(\w+)", inner):
        fields: Mapping[str, Any] = {one.encode_name: one.type for one in msgspec.structs.fields(form)}
        form = getattr(fields[name], "__args__", (fields[name],))[0]
    return [one.encode_name for one in msgspec.structs.fields(form)]


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"
