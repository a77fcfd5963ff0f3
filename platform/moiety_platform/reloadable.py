"""How a setting is declared: what it means, and whether a change of the file is taken while the process runs."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

RELOAD = "reload"  # in a field's JSON schema: one of the next two
AT_ONCE, AT_RESTART = "at once", "at a restart"


def live(default: Any, told: str, **checks: Any) -> Any:
    """A setting whose change is taken within seconds, by whoever follows it (see `live_settings`)."""
    return Field(default=default, description=told, json_schema_extra={RELOAD: AT_ONCE}, **checks)


def fixed(default: Any, told: str, **checks: Any) -> Any:
    """A setting by which something is opened that lasts as long as the process."""
    return Field(default=default, description=told, json_schema_extra={RELOAD: AT_RESTART}, **checks)


def reload_of(model: type[BaseSettings], name: str) -> str:
    """When a change of the setting is taken."""
    extra = model.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), f"{name} is declared as live or fixed"
    return str(extra[RELOAD])


def is_live(model: type[BaseSettings], name: str) -> bool:
    return reload_of(model, name) == AT_ONCE
