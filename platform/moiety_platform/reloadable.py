"""Declaration of settings: description, and hot reload or restart."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

RELOAD = "reload"  # key in a field's JSON schema, with one of the next two values
AT_ONCE, AT_RESTART = "at once", "at a restart"


def live(default: Any, description: str, **checks: Any) -> Any:
    """Declare a setting with hot reload, which a follower applies within seconds (see `live_settings`)."""
    return Field(default=default, description=description, json_schema_extra={RELOAD: AT_ONCE}, **checks)


def fixed(default: Any, description: str, **checks: Any) -> Any:
    """Declare a setting that needs a restart, since its resource lives as long as the process."""
    return Field(default=default, description=description, json_schema_extra={RELOAD: AT_RESTART}, **checks)


def reload_of(model: type[BaseSettings], name: str) -> str:
    """Return when a change of the setting takes effect."""
    extra = model.model_fields[name].json_schema_extra
    assert isinstance(extra, dict), f"{name} is declared as live or fixed"
    return str(extra[RELOAD])


def is_live(model: type[BaseSettings], name: str) -> bool:
    return reload_of(model, name) == AT_ONCE
