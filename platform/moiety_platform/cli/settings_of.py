"""The gateway's settings for a command that looks at them, with what is wrong told as a command tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from moiety_platform.config_file import ConfigFileError
from moiety_platform.settings import GatewaySettings


def load_settings(config: Path | None, **flags: Any) -> GatewaySettings:
    """Raises typer.BadParameter."""
    try:
        return GatewaySettings.load(config, **flags)
    except ConfigFileError as exc:
        raise typer.BadParameter(str(exc)) from exc
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in exc.errors())
        raise typer.BadParameter(problems) from exc
