"""The gateway's settings: one frozen model, read from flags, environment (`MOIETY_…`) and one TOML or YAML file.

Read and validated by the entry point, passed down as an argument; nothing else reads the environment.
"""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AliasChoices, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from moiety_platform.config_file import read_config_section
from moiety_platform.engine_addresses import identity
from moiety_platform.reloadable import fixed, live
from moiety_wire.grammars import MAX_GUIDE_BYTES

SECTION = "gateway"
MIN_DAYS_OF_USAGE = 62  # so that late usage of the previous month still finds its requests
LOOPBACK = ("127.0.0.1", "::1", "localhost")


TRACES_FILE = "traces.db"
_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///(?:.*/)?)[^/?]+", re.DOTALL)


def traces_beside(store_url: str) -> str:
    """Return the default URL of the trace store.

    Beside a SQLite store it is a file of its own, since SQLite has one writer and spans would delay the ledger; on
    PostgreSQL it is the same database.
    """
    found = _SQLITE_FILE.fullmatch(store_url)
    return store_url if found is None else found[1] + TRACES_FILE


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _also(name: str, variable: str) -> AliasChoices:
    """Return aliases with OpenTelemetry's own variable, which our engines read, too, so that one variable suffices."""
    return AliasChoices(name, f"MOIETY_{name.upper()}", variable)


class GatewaySettings(BaseSettings):
    """All settings of one gateway process."""

    model_config = SettingsConfigDict(env_prefix="MOIETY_", frozen=True, extra="forbid", validate_default=True)

    host: str = fixed("127.0.0.1", "address to listen on")
    port: int = fixed(8000, "port to listen on; 0 takes a free one", ge=0, le=65535)
    operations_host: str = fixed("127.0.0.1", "address of the operations listener, where operations_port is set")
    operations_port: int | None = fixed(
        None,
        "port of the operations listener (/metrics, /schema); 0 takes a free one; none: both are on `port` where "
        "`host` is a loopback address, and nowhere else",
        ge=0, le=65535,
    )  # fmt: skip
    data_dir: Path = fixed(Path(".moiety"), "for the pepper, the usage journal and SQLite")
    database_url: str | None = fixed(None, "of the store: sqlite:///FILE or postgresql://…; none: SQLite in data_dir")
    key_pepper: SecretStr | None = fixed(None, "mixed into the hash of every API key; lives outside the database")
    key_pepper_next: SecretStr | None = fixed(None, "the one to come: keys that others have hashed with it are taken")
    key_pepper_previous: SecretStr | None = fixed(None, "the one before: its keys are taken, and hashed anew when used")

    engines: Annotated[tuple[str, ...], NoDecode] = live(
        (), "addresses of engines, of names that several stand behind, or of servers of others"
    )
    external_engine_api_key: SecretStr | None = live(None, "of servers of others whose address names no key_file")
    curve_server_key: str | None = fixed(None, "the engines' public key; set all three or none")
    curve_public_key: str | None = fixed(None, "this gateway's, by CURVE")
    curve_secret_key: SecretStr | None = fixed(None, "that belongs to it")

    oidc_issuer: str | None = live(None, "whose tokens the admin API takes beside keys; set the audience too")
    oidc_audience: str | None = live(None, "which the tokens must name")
    oidc_roles_claim: str = live("moiety_roles", "a role or a list of them; a claim inside another with dots")
    oidc_tenant_claim: str = live("moiety_tenant", "the id of the one tenant that the token is for, if any")

    webhook_networks: Annotated[tuple[str, ...], NoDecode] = live(
        (), "networks that webhooks may go to beside the public internet"
    )

    max_body_bytes: int = live(4 * 1024 * 1024, "of a request's body", ge=1024)
    max_json_depth: int = live(64, "of brackets within brackets of a body", ge=4, le=128)
    max_messages: int = live(2048, "of a chat, and items of a conversation", ge=1, le=16_384)
    max_choices: int = live(16, "answers to a prompt: `n`", ge=1, le=128)
    max_stop_strings: int = live(16, "of a request", ge=1, le=64)
    max_stop_chars: int = live(1024, "of each stop string", ge=1, le=4096)
    max_tools: int = live(128, "of a request", ge=1, le=1024)
    max_tool_schema_bytes: int = live(65_536, "of each tool's parameters, as JSON", ge=256)
    max_guide_bytes: int = live(65_536, "of a schema, expression or grammar", ge=256, le=MAX_GUIDE_BYTES)
    max_header_bytes: int = live(32 * 1024, "of a request's line and headers", ge=4096)
    max_headers: int = live(100, "of a request", ge=16)
    header_timeout_s: float = live(15, "until a request's line and headers are there", gt=0)
    body_timeout_s: float = live(30, "a body comes at 500 bytes/s at least, looked at so often", gt=0)
    keep_alive_s: int = live(60, "how long a connection stays open without a request", ge=1)
    max_streams_per_key: int = live(1024, "streams of one key open at this gateway; beyond: 429", ge=1)
    max_sequences: int = live(128, "prompts × n of one request", ge=1)
    max_inflight_per_tenant: int = live(4096, "sequences of one tenant at this gateway; beyond: 429", ge=1)
    credit_window_tokens: int = live(128, "output tokens that are reserved ahead of an answer", ge=1)
    inline_tokenize_bytes: int = live(8192, "longer prompts are tokenized off the event loop", ge=0)
    send_timeout_s: float = live(60, "a client that takes nothing for so long is hung up on", gt=0)
    failover_wait_s: float = live(1, "how long a sequence waits for an engine when its own is lost", ge=0)
    max_file_bytes: int = live(100_000_000, "of one uploaded file", ge=1024)
    max_file_bytes_per_tenant: int = live(10_000_000_000, "of all its files, results included", ge=1024)
    max_adapter_bytes: int = live(256_000_000, "of one adapter's tensors", ge=1024)
    max_adapter_bytes_per_tenant: int = live(2_000_000_000, "of all its adapters", ge=1024)
    max_batch_lines: int = live(50_000, "of a batch", ge=1)
    max_open_batches_per_tenant: int = live(100, "batches that have not ended", ge=1)
    batch_concurrency: int = live(32, "lines of batches at a time; 0: other gateways do the work", ge=0, le=4096)
    batch_lease_s: float = live(30, "after which the lines of a killed gateway are others'", ge=1, le=3600)
    drain_s: int = live(30, "how long a stop waits for running answers", ge=0)

    idempotency_ttl_s: float = live(24 * 3600, "how long answers are kept under their Idempotency-Key", gt=0)
    idempotency_max_answer_bytes: int = live(1024 * 1024, "of a larger one, only that there was one", ge=0)
    idempotency_max_keys_per_tenant: int = live(100_000, "keys; beyond: 429", ge=1)
    idempotency_max_bytes_per_tenant: int = live(
        256 * 1024 * 1024, "bytes of answers; beyond: as of a larger answer", ge=0
    )

    responses_ttl_s: float = live(30 * 86_400, "how long responses are kept that asked for it", gt=0)
    responses_max_per_tenant: int = live(10_000, "responses; beyond: 429; 0: none are kept", ge=0, le=100_000)
    responses_max_bytes_per_tenant: int = live(256 * 1024 * 1024, "bytes of responses; beyond: 429", ge=0)

    simulation_limit_s: float = live(300, "how long a simulation may take", gt=0)
    simulation_niceness: int = live(10, "how far it gives way to what is served", ge=0, le=19)
    retention_interval_s: float = live(60, "how often what is past its time is deleted", gt=0)
    keep_files_days: int = live(30, "of files for which no end was asked; 0: until they are deleted", ge=0, le=3_650)
    keep_batches_days: int = live(30, "of batches, from their making, and as long as their files", ge=2, le=3_650)
    keep_requests_days: int = live(0, "of single requests: 0, for ever, or 62 at least", ge=0, le=3_650)
    keep_limit_windows_days: int = live(
        120, "of the windows of limits, from their beginning", ge=MIN_DAYS_OF_USAGE, le=3_650
    )

    otlp_endpoint: str | None = live(
        None, "where spans go, such as http://collector:4318; none: nowhere",
        validation_alias=_also("otlp_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    )  # fmt: skip
    otlp_protocol: Literal["http/protobuf", "grpc"] = live(
        "http/protobuf", "by gRPC the port is 4317; it needs moiety[grpc]",
        validation_alias=_also("otlp_protocol", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    )  # fmt: skip
    otlp_metrics_endpoint: str | None = live(
        None, "where metrics go, such as http://collector:4318/v1/metrics; none: they are only at /metrics",
        validation_alias=_also("otlp_metrics_endpoint", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
    )  # fmt: skip
    otlp_metrics_interval_ms: int = live(
        60_000, "how often metrics go there", ge=100,
        validation_alias=_also("otlp_metrics_interval_ms", "OTEL_METRIC_EXPORT_INTERVAL"),
    )  # fmt: skip
    traces_endpoint: str | None = live(
        None, "of our own trace store, such as http://traces:4318/otlp; none: no trace is kept"
    )
    traces_token: SecretStr | None = live(None, "by which that store knows its gateways")
    traces_database_url: str | None = fixed(None, "where it keeps them; none: beside a SQLite store, or in PostgreSQL")
    trace_sample_rate: float = live(0.02, "share of the traces that nothing speaks for", ge=0, le=1)
    trace_sample_rates: Annotated[dict[str, float], NoDecode] = live({}, "that share by class: priority=1,…")
    trace_first_per_s: int = live(1, "traces of every second that are kept whatever the rate is", ge=0)
    trace_max_per_s: int = live(100, "traces that are kept in all; what goes beyond is counted", ge=1)
    metrics_tenants: int = live(20, "with series of their own at /metrics; the rest are summed", ge=0, le=1000)
    log_level: Literal["debug", "info", "warning", "error"] = live("info", "from which on events are logged")
    log_format: Literal["auto", "json", "console"] = fixed("auto", "of the log; auto: columns on a terminal, else JSON")

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
    def has_operations_on_port(self) -> bool:
        """True if the API's port also serves the operations pages.

        This is without a separate listener, and only on loopback, since the pages need no key.
        """
        return self.operations_port is None and is_loopback(self.host)

    @property
    def keep_files_s(self) -> int | None:
        """Lifetime of a file without a requested expiry, in seconds; None: until it is deleted."""
        return self.keep_files_days * 24 * 3600 or None

    @property
    def store_url(self) -> str:
        """The SQLAlchemy URL of the store, resolved."""
        return self.database_url or f"sqlite+aiosqlite:///{self.data_dir / 'moiety.db'}"

    @property
    def usage_journal_dir(self) -> Path:
        """Folder of usage rows that are not in the database yet."""
        return self.data_dir / "usage-journal"

    @property
    def traces_url(self) -> str:
        """The SQLAlchemy URL of the trace store, resolved."""
        return self.traces_database_url or traces_beside(self.store_url)

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> GatewaySettings:
        """Return the settings. Raises ConfigFileError or pydantic's ValidationError.

        Precedence: flags that are not None, environment, the file's `gateway` table, defaults.
        """
        document = read_config_section(config, SECTION) if config else {}
        environment = EnvSettingsSource(cls)()  # not validated yet, since one value can require another
        given = {name: value for name, value in flags.items() if value is not None}
        return cls(**{**document, **environment, **given})
