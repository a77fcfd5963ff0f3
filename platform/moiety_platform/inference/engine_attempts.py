"""Attempts of sequences at engines, recorded at submission and exported as spans after the request."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import PlatformError, UpstreamError


@dataclass(slots=True)
class EngineAttempt:
    """One sequence at one engine.

    Owned by the request's record. A sequence that failed over has several attempts in order.
    """

    sequence: int  # index within the request
    address: str  # of the engine
    stream: EngineStream
    num_resumed_tokens: int  # output tokens from earlier engines
    submitted_ns: int
    failed_ns: int = 0
    error_code: str | None = None  # of the engine's error
    upstream: UpstreamError | None = None  # error of an external engine

    def failed(self, error: PlatformError, unix_ns: int) -> None:
        self.error_code, self.upstream, self.failed_ns = error.code, error.upstream, unix_ns
