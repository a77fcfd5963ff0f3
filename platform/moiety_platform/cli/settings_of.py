"""Loading of the gateway's settings for commands, with errors as usage errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from moiety_platform.config_file import ConfigFileError
from moiety_platform.reloading.source import SettingsSource, complaints
from moiety_platform.settings import SECTION, GatewaySettings


def load_settings(config: Path | None, **flags: Any) -> GatewaySettings:
    """Load the settings. Raises typer.BadParameter."""
    with _as_command_errors():
        return GatewaySettings.load(config, **flags)


def open_settings(config: Path | None, **flags: Any) -> SettingsSource[GatewaySettings]:
    """Return the settings source of a process that reads its file again. Raises typer.BadParameter."""
    options = [name for name, value in flags.items() if value is not None]
    with _as_command_errors():
        return SettingsSource.open(config, SECTION, partial(GatewaySettings.load, config, **flags), options)


@contextmanager
def _as_command_errors() -> Iterator[None]:
    try:
        yield
    except ConfigFileError as exc:
        raise typer.BadParameter(str(exc)) from exc
    except ValidationError as exc:
        raise typer.BadParameter(complaints(exc)) from exc
