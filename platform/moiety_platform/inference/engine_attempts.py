"""A sequence at an engine: noted when it is given there, and told in spans once its request has ended."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import PlatformError, UpstreamError


@dataclass(slots=True)
class EngineAttempt:
    """Owned by the request's record. A sequence that failed over has several, in their order."""

    sequence: int  # its index within the request
    address: str  # of the engine
    stream: EngineStream
    num_resumed_tokens: int  # of its output, which it brought along
    submitted_ns: int
    failed_ns: int = 0
    error_code: str | None = None  # with which the engine ended it
    upstream: UpstreamError | None = None  # of an external engine

    def failed(self, error: PlatformError, unix_ns: int) -> None:
        self.error_code, self.upstream, self.failed_ns = error.code, error.upstream, unix_ns
