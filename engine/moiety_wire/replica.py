"""Interface of an engine in the same process: it uses the messages of the wire without a connection."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from moiety_wire.messages import ModelCard, Submit, ToGateway


class Replica(Protocol):
    """Engine of one model in this process, with all credit given in advance. One thread at a time."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        ...

    @property
    def max_running(self) -> int:
        """Sequences of a full batch."""
        ...

    def advance(self, submits: Iterable[Submit] = (), *, at_most_s: float = ...) -> list[ToGateway]:
        """Submit requests, and run steps for about `at_most_s`, or until no request is open.

        Returns the messages about the requests, in order. Each request ends with exactly one Finished or Failed.
        """
        ...

    def environment(self) -> dict[str, Any]:
        """Return what figures depend on besides settings: versions, device, threads, data type of the weights."""
        ...

    def close(self) -> None:
        """Release the memory. Open requests are dropped."""
        ...
