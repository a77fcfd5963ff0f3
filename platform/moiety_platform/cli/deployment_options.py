"""Options by which a command finds the parts of a deployment: its settings, its stores, its engines and its gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.cli.option_groups import OptionGroup
from moiety_platform.cli.settings_of import load_settings
from moiety_platform.settings import GatewaySettings

ConfigFile = Annotated[Path | None, typer.Option(help="Configuration file of the gateway.")]
DataFolder = Annotated[Path | None, typer.Option(help="Data directory of the gateway.")]
DatabaseUrl = Annotated[str | None, typer.Option(help="URL of the database of the gateway.")]
ObjectStoreUrl = Annotated[str | None, typer.Option(help="URL of the object store of the gateway.")]
EngineAddresses = Annotated[list[str] | None, typer.Option(help="Address of an engine. May be given several times.")]
GatewayUrl = Annotated[str | None, typer.Option(envvar="MOIETY_URL", help="URL of the gateway.")]
AdminKey = Annotated[str | None, typer.Option(envvar="MOIETY_ADMIN_KEY", help="Admin key whose validity is checked.")]


@dataclass(frozen=True)
class DatabaseOptions(OptionGroup):
    """Options of the settings that a command needs for the database and the data directory."""

    config: ConfigFile = None
    data_dir: DataFolder = None
    database_url: DatabaseUrl = None

    def load_settings(self) -> GatewaySettings:
        """Load the settings of the gateway. Raises typer.BadParameter."""
        return load_settings(self.config, data_dir=self.data_dir, database_url=self.database_url)


@dataclass(frozen=True)
class StoreOptions(DatabaseOptions):
    """Options of the settings that a command needs for all stores of a gateway."""

    object_store_url: ObjectStoreUrl = None

    def load_settings(self) -> GatewaySettings:
        return load_settings(
            self.config,
            data_dir=self.data_dir,
            database_url=self.database_url,
            object_store_url=self.object_store_url,
        )


@dataclass(frozen=True)
class DeploymentOptions(DatabaseOptions):
    """Options of the settings, the engines and the gateway of a deployment that a command checks."""

    engine: EngineAddresses = None
    url: GatewayUrl = None
    admin_key: AdminKey = None

    def load_settings(self) -> GatewaySettings:
        engines = tuple(self.engine) if self.engine else None
        return load_settings(self.config, data_dir=self.data_dir, database_url=self.database_url, engines=engines)
