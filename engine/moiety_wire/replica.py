"""What an engine is to whoever has it in the same process: the messages of the wire, without a wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from moiety_wire.messages import ModelCard, Submit, ToGateway


class Replica(Protocol):
    """One model, with all its credit given in advance. One thread at a time."""

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
        """Take requests in and run steps for about so long, or until none is open; what there is to tell of them, in
        order. Each ends with exactly one Finished or Failed."""
        ...

    def environment(self) -> dict[str, Any]:
        """What figures depend on besides settings: versions, device, threads, type of the weights."""
        ...

    def close(self) -> None:
        """Give the memory back. What was open is forgotten."""
        ...
