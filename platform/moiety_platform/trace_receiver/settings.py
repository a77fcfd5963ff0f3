"""The trace store's settings, read like the gateway's: flags, environment (`MOIETY_…`) and one TOML or YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import SecretStr, model_validator
from pydantic_settings import EnvSettingsSource, SettingsConfigDict

from moiety_platform.config_file import read_config_section
from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import fixed, live
from moiety_platform.settings import SECTION as GATEWAY_SECTION
from moiety_platform.trace_store_url import traces_beside

SECTION = "traces"
SHARED_WITH_GATEWAY = ("data_dir", "database_url", "traces_database_url", "traces_token")


class TraceSettings(ProcessSettings):
    """All settings of one trace store."""

    model_config = SettingsConfigDict(env_prefix="MOIETY_", frozen=True, extra="forbid", validate_default=True)

    traces_host: str = fixed("127.0.0.1", "Address at which the trace store listens.")
    traces_port: int = fixed(4318, "Port at which the trace store listens; 0 selects a free one.", ge=0, le=65535)
    data_dir: Path = fixed(Path(".moiety"), "Folder for the SQLite database.")
    database_url: str | None = fixed(None, "URL of the gateway's database.")
    traces_database_url: str | None = fixed(
        None,
        "URL of the database for spans. If not set, a file beside the gateway's SQLite database, or its PostgreSQL "
        "database.",
    )
    traces_token: SecretStr = live(
        ..., "Token that authenticates gateways. Tenant ids in their spans are trusted.", min_length=16
    )
    traces_untrusted_token: SecretStr | None = live(
        None, "Token for other senders of spans. Tenant ids in their spans are not trusted.", min_length=16
    )

    traces_max_body_bytes: int = live(
        4 * 1024 * 1024, "Largest size of a request after decompression, in bytes.", ge=1024
    )
    traces_queue_spans: int = live(
        20_000, "Largest number of spans that wait for the database. Further requests are rejected with 503.", ge=1000
    )
    keep_traces_days: float = live(7, "Retention of traces, in days.", gt=0, le=3_650)
    retention_interval_s: float = live(60, "Interval between deletions of expired traces, in seconds.", gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = live("info", "Lowest level of log events.")
    log_format: Literal["auto", "json", "console"] = fixed(
        "auto", "Format of the log. auto writes columns on a terminal, otherwise JSON."
    )

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if self.traces_untrusted_token == self.traces_token:
            raise ValueError(
                "traces_untrusted_token and traces_token must differ: spans sent with the latter are trusted"
            )
        return self

    @property
    def store_url(self) -> str:
        """The SQLAlchemy URL of the database, resolved."""
        store_url = self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'moiety.db'}"
        return self.traces_database_url or traces_beside(store_url)

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> TraceSettings:
        """Return the settings. Raises ConfigFileError or pydantic's ValidationError.

        Precedence: flags that are not None, environment, the file's `traces` table, for the database also its `gateway`
        table, defaults.
        """
        document = {}
        if config:
            gateways = read_config_section(config, GATEWAY_SECTION)
            shared = {name: value for name, value in gateways.items() if name in SHARED_WITH_GATEWAY}
            document = shared | read_config_section(config, SECTION)
        given = {name: value for name, value in flags.items() if value is not None}
        environment = EnvSettingsSource(cls)()
        return cls(**{**document, **environment, **given})
