"""Options of a command that are settings of the process that it starts, with the settings' own descriptions."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings


def setting_option(model: type[BaseSettings], name: str) -> Any:
    """Return an option for one setting.

    The option has no default: if it is not given, the environment, the configuration file or the setting's default
    applies.
    """
    field = model.model_fields[name]
    bounds = {bound: _bound(field, check) for bound, check in (("min", "ge"), ("max", "le"))}
    given = {bound: value for bound, value in bounds.items() if value is not None}
    told = [field.description or ""]
    if get_origin(field.annotation) is Literal:
        told.append(f"One of {', '.join(get_args(field.annotation))}.")
    if not isinstance(field.default, NoneType):
        told.append(f"The default of the setting is {field.default}.")
    return typer.Option(help=" ".join(told), **given)


def _bound(field: FieldInfo, check: str) -> Any:
    found = [getattr(one, check) for one in field.metadata if hasattr(one, check)]
    return found[0] if found else None
