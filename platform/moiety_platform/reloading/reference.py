"""Generator of the settings reference in Markdown, from their declarations: `docs/settings.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from moiety_platform.reloadable import reload_of
from moiety_platform.reloading.shown import shown

HEAD = """# Settings

Made by `moiety config reference` of the settings' declarations; change it there. How they are given and how a running
process takes a change of its file: [operations](operations.md#changing-the-configuration-of-what-runs).
"""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "min_length": "characters ≥"}


def reference_of(tables: dict[str, type[BaseSettings]]) -> str:
    """Return the reference of all tables of the file."""
    parts = [HEAD]
    for section, model in tables.items():
        parts.append(f"\n## `{section}`\n\n| setting | default | a change is taken | is |\n|---|---|---|---|\n")
        parts += [_row(model, name, field) for name, field in model.model_fields.items()]
    return "".join(parts)


def _row(model: type[BaseSettings], name: str, field: FieldInfo) -> str:
    bounds = ", ".join(_bounds(field))
    told = (field.description or "").replace("|", "\\|")
    default = "" if field.is_required() else _plain(shown(field.default))
    return f"| `{name}` | {default} | {reload_of(model, name)} | {told}{f' ({bounds})' if bounds else ''} |\n"


def _bounds(field: FieldInfo) -> Iterator[str]:
    for one in field.metadata:
        for attribute, sign in BOUNDS.items():
            if (bound := getattr(one, attribute, None)) is not None:
                yield f"{sign} {bound:,}"
    choices = re.findall(r"'([^']+)'", str(field.annotation)) if "Literal" in str(field.annotation) else []
    if choices:
        yield ", ".join(choices)


def _plain(value: Any) -> str:
    if value is None or value in ([], {}):
        return "–"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else f"`{value}`"
