"""Parts that replace those of a gateway's composition, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from litestar.types import ControllerRouterHandler

from moiety_platform.backoff import Backoff
from moiety_platform.batches.worker import POLL_S
from moiety_platform.bootstrap.engine_waker import OpenScaler, open_scaler
from moiety_platform.clock import Clock, SystemClock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.files.store import Now
from moiety_platform.inference.request_recorder import UsageSink
from moiety_platform.traces.tracing import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Parts that a caller brings in place of what the settings and the machine give, such as clocks and engines."""

    clock: Clock = field(default_factory=SystemClock)
    breaker_clock: Clock | None = None  # of the engines' circuit breakers; None: `clock`
    now: Now = now_ms  # the database's clock
    engines: Sequence[EngineClient] = ()  # beside those of the settings
    span_senders: Sequence[Sender] = ()  # beside those of the settings
    usage: UsageSink | None = None  # takes the usage rows of requests instead of the store
    database: Database | None = None  # an open store for all uses, which the caller closes
    batch_poll_s: float = POLL_S
    batch_backoff: Backoff = field(default_factory=Backoff)
    admin_routes: Sequence[ControllerRouterHandler] = ()  # beside our own
    open_scaler: OpenScaler = open_scaler  # of the StatefulSets of `scaled_models`
