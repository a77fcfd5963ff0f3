"""Settings of the engine server. The command reads and checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moiety_engine.config import ImageOptions
from moiety_wire.messages import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from moiety_wire.roles import EngineRole

CORE_SILENCE_S = 60.0  # longer than the longest step on a slow processor


@dataclass(frozen=True)
class ServerSettings:
    model: str  # model name that clients use
    tool_format: str = "auto"  # names of formats for the model card
    reasoning_format: str = "auto"
    listen: str = "tcp://127.0.0.1:5757"  # ZeroMQ address; tcp port 0 takes a free one
    address_file: Path | None = None  # the bound address is written here when the engine is ready
    usage_journal: Path | None = None  # usage of ended requests is appended here
    unacknowledged_usage: Path | None = None  # unacknowledged usage is kept here, beyond this engine's life
    metrics_listen: str | None = None  # host:port of its own /metrics; port 0 takes a free one
    drain_timeout_s: float = 30.0
    role: EngineRole = EngineRole.BOTH  # role in the model card
    device_group: str = ""  # device group in the model card
    adapters: tuple[str, ...] = ()  # adapters that the core loads at its start
    adapter_disk_bytes: int = 4 << 30  # disk limit for adapters that gateways send
    images: ImageOptions = field(default_factory=ImageOptions)  # limits of decoding
    core_silence_s: float = CORE_SILENCE_S  # silence after which a core process counts as hanging
    curve_secret_key: bytes | None = None  # Z85; with it only clients that know our public key can connect
    gateway_keys_file: Path | None = None  # public keys (Z85) of the gateways that may connect; needs CURVE
    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    silence_limit_s: float = SILENCE_LIMIT_S
    max_outbox_messages: int = 100_000  # outbox limit of a gateway that does not read; beyond it, it counts as dead
    send_high_water: int = 1000  # messages in a gateway's socket queue before they wait in its outbox
