"""The gateway's settings: one frozen model, read from flags, environment (`MOIETY_…`) and one TOML or YAML file.

Read and validated by the entry point, passed down as an argument; nothing else reads the environment.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, SecretStr, field_validator, model_validator
from pydantic_settings import EnvSettingsSource, NoDecode, SettingsConfigDict

from moiety_platform.alert_settings import AlertSettings
from moiety_platform.config_file import read_config_section
from moiety_platform.content_settings import ContentSettings
from moiety_platform.document_settings import DocumentSettings
from moiety_platform.engine_addresses import identity
from moiety_platform.export_settings import ExportSettings
from moiety_platform.log_settings import LogSettings
from moiety_platform.object_store_url import check_url
from moiety_platform.oidc_settings import OidcSettings
from moiety_platform.origins import check_origin
from moiety_platform.quote_settings import QuoteSettings
from moiety_platform.receipt_settings import ReceiptSettings
from moiety_platform.reloadable import fixed, live
from moiety_platform.routing_settings import RoutingSettings
from moiety_platform.spot_settings import SpotSettings
from moiety_platform.token_count_settings import TokenCountSettings
from moiety_platform.trace_store_url import traces_beside
from moiety_platform.wake_settings import WakeSettings
from moiety_wire.grammars import MAX_GRAMMAR_BYTES

SECTION = "gateway"
NETWORKS = ("webhook_networks", "image_link_networks", "document_link_networks")  # settings
MIN_DAYS_OF_USAGE = 62  # so that late usage of the previous month still finds its requests


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _also(name: str, variable: str) -> AliasChoices:
    """Return aliases with OpenTelemetry's own variable, which our engines read, too, so that one variable suffices."""
    return AliasChoices(name, f"MOIETY_{name.upper()}", variable)


class GatewaySettings(
    LogSettings, DocumentSettings, QuoteSettings, SpotSettings, ReceiptSettings, TokenCountSettings, RoutingSettings,
    ExportSettings, OidcSettings, AlertSettings, WakeSettings, ContentSettings,
):  # fmt: skip
    """All settings of one gateway process."""

    model_config = SettingsConfigDict(env_prefix="MOIETY_", frozen=True, extra="forbid", validate_default=True)

    host: str = fixed("127.0.0.1", "Address at which the API listens.")
    port: int = fixed(8000, "Port at which the API listens; 0 selects a free one.", ge=0, le=65535)
    operations_host: str = fixed("127.0.0.1", "Address of the operations endpoints if operations_port is set.")
    operations_port: int | None = fixed(
        None,
        "Port of the operations endpoints /metrics and /schema; 0 selects a free one. If not set, they are on `port` "
        "where `host` is a loopback address, and otherwise not available.",
        ge=0, le=65535,
    )  # fmt: skip
    data_dir: Path = fixed(
        Path(".moiety"), "Folder for the key pepper, the usage journal, the SQLite database and the object store."
    )
    database_url: str | None = fixed(
        None, "URL of the database, sqlite:///FILE or postgresql://…. If not set, a SQLite file in data_dir."
    )
    object_store_url: str | None = fixed(
        None,
        "URL of the object store for contents of files and adapters: file:///FOLDER, s3://BUCKET/PREFIX, gs://… or "
        "az://…. If not set, a folder in data_dir.",
    )
    key_pepper: SecretStr | None = fixed(
        None, "Secret that is hashed together with every API key. It must not be stored in the database."
    )
    key_pepper_next: SecretStr | None = fixed(
        None, "Next pepper during its replacement. Keys that other gateways have already hashed with it are accepted."
    )
    key_pepper_previous: SecretStr | None = fixed(
        None, "Previous pepper during its replacement. Its keys are accepted, and hashed with the new one when used."
    )

    engines: Annotated[tuple[str, ...], NoDecode] = live(
        (),
        "Addresses of engines, of DNS names that resolve to several engines, or of external (OpenAI-compatible) "
        "servers.",
    )
    external_engine_api_key: SecretStr | None = live(
        None, "API key for external engines whose address has no key_file."
    )
    curve_server_key: str | None = fixed(None, "Public CURVE key of the engines. Set all three CURVE keys or none.")
    curve_public_key: str | None = fixed(None, "Public CURVE key of this gateway.")
    curve_secret_key: SecretStr | None = fixed(None, "Secret CURVE key of this gateway.")

    webhook_networks: Annotated[tuple[str, ...], NoDecode] = live(
        (),
        "Private networks in which webhooks, endpoints of guardrails and issuers of JWTs may have addresses, in "
        "addition to the public internet.",
    )
    image_link_networks: Annotated[tuple[str, ...], NoDecode] = live(
        (), "Private networks to which links to images may lead, in addition to the public internet."
    )
    max_image_links: int = live(0, "Largest number of links to images in a request. 0: none is followed.", ge=0, le=64)
    max_image_link_requests_per_tenant: int = live(
        16, "Largest number of requests of a tenant that fetch linked files at this gateway. Others get 429.", ge=1
    )

    max_body_bytes: int = live(4 * 1024 * 1024, "Largest request body accepted, in bytes.", ge=1024)
    max_json_depth: int = live(64, "Largest nesting depth of the JSON of a request body.", ge=4, le=128)
    max_messages: int = live(
        2048, "Largest number of messages in a chat request, and of items in a conversation.", ge=1, le=16_384
    )
    max_choices: int = live(16, "Largest number of choices per prompt, the parameter `n`.", ge=1, le=128)
    max_stop_strings: int = live(32, "Largest number of stop strings in a request.", ge=1, le=64)
    max_stop_chars: int = live(1024, "Largest length of a stop string, in characters.", ge=1, le=4096)
    max_tools: int = live(128, "Largest number of tools in a request.", ge=1, le=1024)
    max_tool_schema_bytes: int = live(
        65_536, "Largest size of the JSON schema of a tool's parameters, in bytes.", ge=256
    )
    max_grammar_bytes: int = live(
        65_536,
        "Largest size of a JSON schema, regular expression or grammar for structured outputs, in bytes.",
        ge=256,
        le=MAX_GRAMMAR_BYTES,
    )
    max_header_bytes: int = live(32 * 1024, "Largest size of a request's first line and headers, in bytes.", ge=4096)
    max_headers: int = live(100, "Largest number of headers in a request.", ge=16)
    header_timeout_s: float = live(15, "Longest time until the headers of a request are complete, in seconds.", gt=0)
    body_timeout_s: float = live(
        30,
        "Interval at which the speed of an incoming body is checked, in seconds. The body must arrive at 500 bytes/s "
        "or more.",
        gt=0,
    )
    keep_alive_s: int = live(60, "Time for which an idle connection stays open, in seconds.", ge=1)
    sse_keep_alive_s: float = live(
        15,
        "Silence after which a streamed answer gets a keep-alive event, in seconds. It can be the first part of an "
        "answer that an engine has accepted. 0 sends none.",
        ge=0,
    )
    cors_allowed_origins: Annotated[tuple[str, ...], NoDecode] = live(
        (), "Origins whose web pages may call the API from a browser, such as https://app.example.com. * allows all."
    )
    max_streams_per_key: int = live(
        1024, "Largest number of open streams of one key at this gateway. Further requests are rejected with 429.", ge=1
    )
    max_resumed_streams_per_tenant: int = live(
        64, "Largest number of resumed streams of a tenant that are open at this gateway. Others get 429.", ge=1
    )
    max_sequences: int = live(128, "Largest number of sequences in one request: prompts × n.", ge=1)
    clamp_max_tokens: bool = live(
        False,
        "Whether a limit on output tokens that exceeds the rest of the context is lowered to it. Otherwise it is "
        "rejected with 400. `/v1/messages` always lowers it.",
    )
    max_inflight_per_tenant: int = live(
        4096,
        "Largest number of running sequences of one tenant at this gateway. Further requests are rejected with 429.",
        ge=1,
    )
    credit_window_tokens: int = live(
        128, "Number of output tokens that an engine may send before the gateway grants more.", ge=1
    )
    inline_tokenize_bytes: int = live(
        8192, "Prompt size up to which the event loop tokenizes, in bytes. A thread tokenizes longer prompts.", ge=0
    )
    encoding_cache_bytes: int = live(
        67_108_864,
        "Size of the cache of the token ids of conversations' messages, in bytes. Tenants do not share entries. 0 "
        "disables it.",
        ge=0,
    )
    send_timeout_s: float = live(
        60, "Time after which a client that reads nothing of its response is disconnected, in seconds.", gt=0
    )
    failover_wait_s: float = live(
        1, "Longest time that a sequence waits for another engine after its engine failed, in seconds.", ge=0
    )
    max_file_bytes: int = live(100_000_000, "Largest size of an uploaded file, in bytes.", ge=1024)
    max_file_bytes_per_tenant: int = live(
        10_000_000_000, "Largest total size of a tenant's files including batch results, in bytes.", ge=1024
    )
    max_adapter_bytes: int = live(256_000_000, "Largest size of the tensors of an adapter, in bytes.", ge=1024)
    max_adapter_bytes_per_tenant: int = live(
        2_000_000_000, "Largest total size of a tenant's adapters, in bytes.", ge=1024
    )
    max_batch_lines: int = live(50_000, "Largest number of requests in a batch.", ge=1)
    max_open_batches_per_tenant: int = live(100, "Largest number of unfinished batches of a tenant.", ge=1)
    batch_concurrency: int = live(
        32,
        "Number of batch requests that this gateway runs at the same time; 0 leaves batches to other gateways.",
        ge=0,
        le=4096,
    )
    batch_lease_s: float = live(
        30,
        "Time after which other gateways take over the batch requests of a failed gateway, in seconds.",
        ge=1,
        le=3600,
    )
    drain_s: int = live(30, "Longest time that a stop waits for running requests to finish, in seconds.", ge=0)

    idempotency_ttl_s: float = live(
        24 * 3600, "Time for which a response is stored under its Idempotency-Key, in seconds.", gt=0
    )
    idempotency_max_answer_bytes: int = live(
        1024 * 1024,
        "Largest response stored under an Idempotency-Key, in bytes. For a larger one only its completion is "
        "recorded, and a repetition is rejected.",
        ge=0,
    )
    idempotency_max_keys_per_tenant: int = live(
        100_000, "Largest number of idempotency keys of a tenant. Further requests are rejected with 429.", ge=1
    )
    idempotency_max_bytes_per_tenant: int = live(
        256 * 1024 * 1024,
        "Largest total size of a tenant's stored idempotent responses, in bytes. Further ones are treated as larger "
        "than idempotency_max_answer_bytes.",
        ge=0,
    )

    responses_store_by_default: bool = live(
        False,
        "Whether requests of the Responses API without 'store' store their responses, as OpenAI's do. Needed by "
        "clients that refer to earlier responses or items without setting 'store'.",
    )
    responses_ttl_s: float = live(
        30 * 86_400, "Time for which responses of the Responses API are stored on request, in seconds.", gt=0
    )
    responses_max_per_tenant: int = live(
        10_000,
        "Largest number of stored responses of a tenant; 0 disables storage. Further requests are rejected with 429.",
        ge=0,
        le=100_000,
    )
    responses_max_bytes_per_tenant: int = live(
        256 * 1024 * 1024,
        "Largest total size of a tenant's stored responses, in bytes. Further requests are rejected with 429.",
        ge=0,
    )

    simulation_limit_s: float = live(300, "Longest duration of a simulation, in seconds.", gt=0)
    simulation_niceness: int = live(
        10,
        "Niceness (scheduling priority) of simulation processes; higher values yield more CPU time to serving.",
        ge=0,
        le=19,
    )
    retention_interval_s: float = live(60, "Interval between deletions of expired data, in seconds.", gt=0)
    keep_files_days: int = live(
        30,
        "Retention of files without a requested expiry, in days; 0 retains them until they are deleted.",
        ge=0,
        le=3_650,
    )
    keep_batches_days: int = live(
        30,
        "Retention of batches after their creation, in days. A batch is also retained as long as its files.",
        ge=2,
        le=3_650,
    )
    keep_requests_days: int = live(
        0, "Retention of the usage rows of single requests, in days: 0 (unlimited) or at least 62.", ge=0, le=3_650
    )
    keep_limit_windows_days: int = live(
        120, "Retention of quota windows after their beginning, in days.", ge=MIN_DAYS_OF_USAGE, le=3_650
    )

    otlp_endpoint: str | None = live(
        None, "OTLP endpoint for spans, such as http://collector:4318. If not set, spans are not exported.",
        validation_alias=_also("otlp_endpoint", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    )  # fmt: skip
    otlp_protocol: Literal["http/protobuf", "grpc"] = live(
        "http/protobuf", "OTLP protocol. grpc uses port 4317 and needs the extra moiety[grpc].",
        validation_alias=_also("otlp_protocol", "OTEL_EXPORTER_OTLP_PROTOCOL"),
    )  # fmt: skip
    otlp_metrics_endpoint: str | None = live(
        None,
        "OTLP endpoint for metrics, such as http://collector:4318/v1/metrics. If not set, metrics are only at "
        "/metrics.",
        validation_alias=_also("otlp_metrics_endpoint", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"),
    )  # fmt: skip
    otlp_metrics_interval_ms: int = live(
        60_000, "Interval between exports of metrics, in milliseconds.", ge=100,
        validation_alias=_also("otlp_metrics_interval_ms", "OTEL_METRIC_EXPORT_INTERVAL"),
    )  # fmt: skip
    traces_endpoint: str | None = live(
        None,
        "Endpoint of the trace store of Moiety, such as http://traces:4318/otlp. If not set, no traces are stored.",
    )
    traces_token: SecretStr | None = live(None, "Token that authenticates gateways at the trace store.")
    traces_database_url: str | None = fixed(
        None,
        "URL of the database of the trace store. If not set, a file beside a SQLite database, or the same PostgreSQL "
        "database.",
    )
    trace_sample_rate: float = live(0.02, "Fraction of the traces to store that no other rule selects.", ge=0, le=1)
    trace_sample_rates: Annotated[dict[str, float], NoDecode] = live(
        {}, "Sample rate by service class, such as priority=1,batch=0.01."
    )
    trace_first_per_s: int = live(
        1, "Number of traces per second that are stored independently of the sample rate.", ge=0
    )
    trace_max_per_s: int = live(
        100, "Largest number of traces stored per second. Further ones are dropped and counted.", ge=1
    )
    metrics_tenants: int = live(
        20, "Number of tenants with metrics of their own. The metrics of the others are summed.", ge=0, le=1000
    )

    @field_validator("engines", "cors_allowed_origins", *NETWORKS, mode="before")
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

    @field_validator(*NETWORKS)
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ip_network(network)
        return value

    @field_validator("cors_allowed_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_origin, value))

    @field_validator("object_store_url")
    @classmethod
    def _check_object_store(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value)

    @field_validator("keep_requests_days")
    @classmethod
    def _check_requests(cls, value: int) -> int:
        if 0 < value < MIN_DAYS_OF_USAGE:
            raise ValueError(f"set 0 (unlimited), or at least {MIN_DAYS_OF_USAGE} days")
        return value

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
    def objects_url(self) -> str:
        """The URL of the object store, resolved."""
        return self.object_store_url or (self.data_dir / "objects").absolute().as_uri()

    @property
    def has_embedded_stores(self) -> bool:
        """True if the database and the object store are the default ones in `data_dir`."""
        return self.database_url is None and self.object_store_url is None

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
