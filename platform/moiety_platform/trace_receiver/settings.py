"""The trace store's settings, read like the gateway's: flags, environment (`MOIETY_…`) and one TOML or YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from moiety_platform.config_file import read_config_section
from moiety_platform.settings import SECTION as GATEWAY_SECTION
from moiety_platform.settings import traces_beside

SECTION = "traces"
OF_GATEWAYS_TOO = ("data_dir", "database_url", "traces_database_url", "traces_token")


class TraceSettings(BaseSettings):
    """Everything that may be set for one trace store."""

    model_config = SettingsConfigDict(env_prefix="MOIETY_", frozen=True, extra="forbid", validate_default=True)

    traces_host: str = "127.0.0.1"
    traces_port: int = Field(default=4318, ge=0, le=65535)
    data_dir: Path = Path(".moiety")
    database_url: str | None = None  # the gateway's
    traces_database_url: str | None = None  # None: beside that where it is SQLite, the same where it is PostgreSQL
    traces_token: SecretStr = Field(min_length=16)  # of gateways, whose word on tenants is believed
    traces_guest_token: SecretStr | None = Field(default=None, min_length=16)  # of anybody else who may send spans

    traces_max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)  # unpacked
    traces_queue_spans: int = Field(default=20_000, ge=1000)  # that wait for the database; beyond: 503
    keep_traces_days: float = Field(default=7, gt=0, le=3_650)
    upkeep_interval_s: float = Field(default=60, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"

    @property
    def store_url(self) -> str:
        """The SQLAlchemy URL of the database, resolved."""
        store_url = self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'moiety.db'}"
        return self.traces_database_url or traces_beside(store_url)

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> TraceSettings:
        """Settings by precedence: flags that are not None, environment, the file's `traces` table, where the database
        is also its `gateway` table, defaults.
        Raises ConfigFileError or pydantic's ValidationError."""
        document = {}
        if config:
            gateways = read_config_section(config, GATEWAY_SECTION)
            shared = {name: value for name, value in gateways.items() if name in OF_GATEWAYS_TOO}
            document = shared | read_config_section(config, SECTION)
        given = {name: value for name, value in flags.items() if value is not None}
        environment = EnvSettingsSource(cls)()
        return cls(**{**document, **environment, **given})
