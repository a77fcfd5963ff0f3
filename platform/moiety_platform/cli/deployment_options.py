"""Options by which a command finds the parts of a deployment: its settings, its stores and its gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Option(help="Configuration file of the gateway.")]
DataFolder = Annotated[Path | None, typer.Option(help="Data directory of the gateway.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="URL of the database of the gateway.")]
ObjectStoreUrl = Annotated[str | None, typer.Option(help="URL of the object store of the gateway.")]
EngineAddresses = Annotated[list[str] | None, typer.Option(help="Address of an engine. May be given several times.")]
GatewayUrl = Annotated[str | None, typer.Option(envvar="MOIETY_URL", help="URL of the gateway.")]
AdminKey = Annotated[str | None, typer.Option(envvar="MOIETY_ADMIN_KEY", help="Admin key whose validity is checked.")]
