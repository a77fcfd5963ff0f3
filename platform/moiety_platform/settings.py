"""The gateway's settings: one frozen model, read from flags, environment (`MOIETY_…`) and one TOML or YAML file.

Read and validated by the entry point, passed down by argument; nothing else reads the environment.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from moiety_platform.config_file import read_config_section
from moiety_platform.engine_addresses import identity
from moiety_wire.guides import MAX_GUIDE_BYTES

SECTION = "gateway"
MIN_DAYS_OF_USAGE = 62  # so that what is told late, of a month that is just over, finds what it belongs to
LOOPBACK = ("127.0.0.1", "::1", "localhost")


TRACES_FILE = "traces.db"
_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///(?:.*/)?)[^/?]+", re.DOTALL)


def traces_beside(store_url: str) -> str:
    """Where traces are kept unless it is said: in a file of their own beside a SQLite store, where one writes at a time
    and spans would keep the ledger waiting; on PostgreSQL in the same database."""
    found = _SQLITE_FILE.fullmatch(store_url)
    return store_url if found is None else found[1] + TRACES_FILE


class GatewaySettings(BaseSettings):
    """Everything that may be set for one gateway process."""

    model_config = SettingsConfigDict(env_prefix="MOIETY_", frozen=True, extra="forbid", validate_default=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    data_dir: Path = Path(".moiety")
    database_url: str | None = None  # None: SQLite in data_dir
    key_pepper: SecretStr | None = None  # mixed into the hash of every API key; lives outside the database

    engines: Annotated[tuple[str, ...], NoDecode] = ()  # fronts: ZeroMQ addresses, or names of several; or of others
    foreign_api_key: SecretStr | None = None  # for servers of others whose address names no key_file
    curve_server_key: str | None = None  # the engines' public key; set all three or none
    curve_public_key: str | None = None
    curve_secret_key: SecretStr | None = None

    oidc_issuer: str | None = None  # whose tokens the admin API takes beside keys; set the audience too
    oidc_audience: str | None = None  # which the tokens must name
    oidc_roles_claim: str = "moiety_roles"  # a role or a list of them; a claim inside another with dots
    oidc_tenant_claim: str = "moiety_tenant"  # the id of the one tenant that the token is for, if any

    webhook_networks: Annotated[tuple[str, ...], NoDecode] = ()  # that webhooks may go to beside the public internet

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    max_json_depth: int = Field(default=64, ge=4, le=128)
    max_messages: int = Field(default=2048, ge=1, le=16_384)
    max_choices: int = Field(default=16, ge=1, le=128)  # n
    max_stop_strings: int = Field(default=16, ge=1, le=64)
    max_stop_chars: int = Field(default=1024, ge=1, le=4096)  # of each stop string
    max_tools: int = Field(default=128, ge=1, le=1024)
    max_tool_schema_bytes: int = Field(default=65_536, ge=256)  # of each tool's parameters, as JSON
    max_guide_bytes: int = Field(default=65_536, ge=256, le=MAX_GUIDE_BYTES)  # of a schema, expression or grammar
    max_header_bytes: int = Field(default=32 * 1024, ge=4096)  # of a request's line and headers
    max_headers: int = Field(default=100, ge=16)
    header_timeout_s: float = Field(default=15, gt=0)  # until they are there
    body_timeout_s: float = Field(default=30, gt=0)  # a body comes at 500 bytes/s at least, looked at so often
    keep_alive_s: int = Field(default=60, ge=1)  # how long a connection stays open without a request
    max_streams_per_key: int = Field(default=1024, ge=1)  # open at this gateway; beyond: 429
    max_sequences: int = Field(default=128, ge=1)  # prompts × n of one request
    max_inflight_per_tenant: int = Field(default=4096, ge=1)  # sequences of one tenant at this gateway; beyond: 429
    credit_window_tokens: int = Field(default=128, ge=1)
    inline_tokenize_bytes: int = Field(default=8192, ge=0)  # longer prompts are tokenized off the event loop
    send_timeout_s: float = Field(default=60, gt=0)  # a client that takes nothing for so long is hung up on
    failover_wait_s: float = Field(default=1, ge=0)  # how long a sequence waits for an engine when its own is lost
    max_file_bytes: int = Field(default=100_000_000, ge=1024)  # of one uploaded file
    max_file_bytes_per_tenant: int = Field(default=10_000_000_000, ge=1024)  # of all its files, results included
    max_adapter_bytes: int = Field(default=256_000_000, ge=1024)  # of one adapter's tensors
    max_adapter_bytes_per_tenant: int = Field(default=2_000_000_000, ge=1024)
    max_batch_lines: int = Field(default=50_000, ge=1)
    max_open_batches_per_tenant: int = Field(default=100, ge=1)  # that have not ended
    batch_concurrency: int = Field(default=32, ge=0, le=4096)  # lines at a time; 0: other gateways do the work
    batch_lease_s: float = Field(default=30, ge=1, le=3600)  # after which the lines of a killed gateway are others'
    drain_s: int = Field(default=30, ge=0)  # how long a stop waits for running answers

    idempotency_ttl_s: float = Field(default=24 * 3600, gt=0)  # how long answers are kept under their Idempotency-Key
    idempotency_max_answer_bytes: int = Field(default=1024 * 1024, ge=0)  # of a larger one, only that there was one
    idempotency_max_keys_per_tenant: int = Field(default=100_000, ge=1)  # beyond: 429
    idempotency_max_bytes_per_tenant: int = Field(default=256 * 1024 * 1024, ge=0)  # beyond: as of a larger answer

    responses_ttl_s: float = Field(default=30 * 86_400, gt=0)  # how long responses are kept that asked for it
    responses_max_per_tenant: int = Field(default=10_000, ge=0, le=100_000)  # beyond: 429; 0: none are kept
    responses_max_bytes_per_tenant: int = Field(default=256 * 1024 * 1024, ge=0)  # beyond: 429

    simulation_limit_s: float = Field(default=300, gt=0)  # how long one may take
    simulation_niceness: int = Field(default=10, ge=0, le=19)  # how far it gives way to what is served
    upkeep_interval_s: float = Field(default=60, gt=0)  # how often what is past its time is deleted
    keep_files_days: int = Field(default=30, ge=0, le=3_650)  # for which no end was asked; 0: until they are deleted
    keep_batches_days: int = Field(default=30, ge=2, le=3_650)  # from their making, and as long as their files
    keep_requests_days: int = Field(default=0, ge=0, le=3_650)  # single ones: 0, for ever, or 62 at least
    keep_limit_windows_days: int = Field(default=120, ge=MIN_DAYS_OF_USAGE, le=3_650)  # from their beginning

    otlp_endpoint: str | None = Field(  # e.g. http://collector:4318; None: no spans leave the process
        default=None,  # OpenTelemetry's own variable is also what our engines go by, so one setting serves both
        validation_alias=AliasChoices("otlp_endpoint", "MOIETY_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    )
    otlp_protocol: Literal["http/protobuf", "grpc"] = Field(  # by gRPC the port is 4317; it needs moiety[grpc]
        default="http/protobuf",
        validation_alias=AliasChoices("otlp_protocol", "MOIETY_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    )
    otlp_metrics_endpoint: str | None = Field(  # e.g. http://collector:4318/v1/metrics; None: they are only at /metrics
        default=None,
        validation_alias=AliasChoices(
            "otlp_metrics_endpoint", "MOIETY_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
        ),
    )
    otlp_metrics_interval_ms: int = Field(  # how often
        default=60_000,
        ge=100,
        validation_alias=AliasChoices(
            "otlp_metrics_interval_ms", "MOIETY_OTLP_METRICS_INTERVAL_MS", "OTEL_METRIC_EXPORT_INTERVAL"
        ),
    )
    traces_endpoint: str | None = None  # of our own trace store, e.g. http://traces:4318/otlp; None: nothing is kept
    traces_token: SecretStr | None = None  # by which that store knows its gateways
    traces_database_url: str | None = None  # where it keeps them; None: beside a SQLite store, or in PostgreSQL
    trace_sample_rate: float = Field(default=0.02, ge=0, le=1)  # of the requests that nothing speaks for
    trace_sample_rates: Annotated[dict[str, float], NoDecode] = Field(default_factory=dict)  # by class: priority=1,…
    trace_first_per_s: int = Field(default=1, ge=0)  # of every second, kept whatever the rate is
    trace_max_per_s: int = Field(default=100, ge=1)  # of all that is kept; what goes beyond is counted
    metrics_tenants: int = Field(default=20, ge=0, le=1000)  # with series of their own at /metrics; the rest are summed
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"

    @field_validator("engines", "webhook_networks", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("trace_sample_rates", mode="before")
    @classmethod
    def _split_rates(cls, value: object) -> object:
        if isinstance(value, str):
            return dict(part.strip().partition("=")[::2] for part in value.split(",") if part.strip())
        return value

    @field_validator("trace_sample_rates")
    @classmethod
    def _check_rates(cls, value: dict[str, float]) -> dict[str, float]:
        for name, rate in value.items():
            if not 0 <= rate <= 1:
                raise ValueError(
                    f"the rate of {name!r} must lie between 0 and 1, not {rate}; write priority=1,batch=0.01"
                )
        return value

    @field_validator("engines")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({identity(address) for address in value}) != len(value):
            raise ValueError("an engine address is listed twice")
        return value

    @field_validator("webhook_networks")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @field_validator("oidc_issuer")
    @classmethod
    def _check_issuer(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            if not url.hostname or (url.scheme != "https" and not (url.scheme == "http" and url.hostname in LOOPBACK)):
                raise ValueError(f"the issuer {value!r} must be an https:// address, or http:// on this machine")
        return value

    @field_validator("keep_requests_days")
    @classmethod
    def _check_requests(cls, value: int) -> int:
        if 0 < value < MIN_DAYS_OF_USAGE:
            raise ValueError(f"set 0, which keeps requests for ever, or at least {MIN_DAYS_OF_USAGE} days")
        return value

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("set oidc_issuer and oidc_audience together, or neither of them")
        return self

    @model_validator(mode="after")
    def _check_traces(self) -> Self:
        if (self.traces_endpoint is None) != (self.traces_token is None):
            raise ValueError("set traces_endpoint and traces_token together, or neither of them")
        return self

    @model_validator(mode="after")
    def _check_curve(self) -> Self:
        keys = (self.curve_server_key, self.curve_public_key, self.curve_secret_key)
        if any(keys) and not all(keys):
            raise ValueError("set curve_server_key, curve_public_key and curve_secret_key together, or none of them")
        return self

    @property
    def keep_files_s(self) -> int | None:
        """How long a file is kept for which no end was asked; None: until it is deleted."""
        return self.keep_files_days * 24 * 3600 or None

    @property
    def store_url(self) -> str:
        """The SQLAlchemy URL of the store, resolved."""
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'moiety.db'}"

    @property
    def traces_url(self) -> str:
        """The SQLAlchemy URL of the trace store, resolved."""
        return self.traces_database_url or traces_beside(self.store_url)

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> GatewaySettings:
        """Settings by precedence: flags that are not None, environment, the file's `gateway` table, defaults.
        Raises ConfigFileError or pydantic's ValidationError."""
        document = read_config_section(config, SECTION) if config else {}
        environment = EnvSettingsSource(cls)()  # not yet checked, since what one says may need what another says
        given = {name: value for name, value in flags.items() if value is not None}
        return cls(**{**document, **environment, **given})
