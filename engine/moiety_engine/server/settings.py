"""The front's settings; read and checked by the command, passed down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moiety_wire.messages import HEARTBEAT_INTERVAL_S, SILENCE_LIMIT_S
from moiety_wire.roles import EngineRole

CORE_SILENCE_S = 60.0  # longer than the longest step on a slow processor


@dataclass(frozen=True)
class ServerSettings:
    model: str  # what clients call the model
    listen: str = "tcp://127.0.0.1:5757"  # ZeroMQ address; tcp port 0 takes a free one
    address_file: Path | None = None  # the bound address is written here when the engine is ready
    usage_journal: Path | None = None  # what ended requests used is appended here
    unacknowledged_usage: Path | None = None  # what gateways have not settled is kept here, beyond this engine's life
    metrics_listen: str | None = None  # host:port of its own /metrics; port 0 takes a free one
    drain_timeout_s: float = 30.0
    role: EngineRole = EngineRole.BOTH  # what gateways are told that it is for
    adapters: tuple[str, ...] = ()  # that the core was given at its start
    adapter_disk_bytes: int = 4 << 30  # of adapters that gateways have sent
    core_silence_s: float = CORE_SILENCE_S  # a core process that says nothing for so long hangs
    curve_secret_key: bytes | None = None  # Z85; with it only clients that know our public key get in
    gateway_keys_file: Path | None = None  # public keys (Z85) of the gateways that may connect; needs CURVE
    heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S
    silence_limit_s: float = SILENCE_LIMIT_S
    max_outbox_messages: int = 100_000  # of a gateway that does not read; beyond it is taken for dead
    send_high_water: int = 1000  # messages in a gateway's socket queue before they wait in its outbox
