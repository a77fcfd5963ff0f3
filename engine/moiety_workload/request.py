"""One request of a trace, and a workload: requests in order of arrival over a known time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_CLASS = "standard"
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One arrival, in seconds from the start of the trace.

    `prefix_ids` name the blocks of the prompt where the trace has them: equal ids are equal blocks, and the last may be
    partly filled.
    """

    arrival_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    service_class: str = DEFAULT_CLASS
    prefix_ids: tuple[int, ...] = ()
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, all before `duration_s`.

    `prefix_block_tokens` is the size of the blocks that prefix_ids name; None where the trace has none. The default
    weight of a tenant is 1.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    duration_s: float
    prefix_block_tokens: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def tenants(self) -> list[str]:
        return sorted({request.tenant for request in self.requests})
