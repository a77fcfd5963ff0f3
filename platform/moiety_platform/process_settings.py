"""Base of the settings of a process: their sources, and their representation without passwords."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from moiety_platform.redaction import redact_text


class ProcessSettings(BaseSettings):
    """Settings of a process, from arguments and the environment, shown without the passwords of their URLs.

    pydantic's other sources are files that we do not use, and would take as long at each start as the environment.
    """

    model_config = SettingsConfigDict(hide_input_in_errors=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [(name, _without_passwords(value)) for name, value in super().__repr_args__()]


def _without_passwords(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value, ()) if "://" in value else value
    if isinstance(value, list | tuple):
        return type(value)(map(_without_passwords, value))
    return {name: _without_passwords(one) for name, one in value.items()} if isinstance(value, dict) else value
