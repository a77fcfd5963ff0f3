"""Response bodies of the admin API for agent runs. Money is in dollars."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from moiety_platform.agent_runs.models import AgentRun, AgentRunRequest
from moiety_platform.prices.token_cost import dollars
from moiety_wire.shared_fields import copy_fields


class RunView(msgspec.Struct, frozen=True):
    """One run. `used_*` are of its ended requests."""

    id: str
    tenant_id: str
    name: str
    status: str
    budget_usd: str | None
    used_usd: str
    budget_tokens: int | None
    used_tokens: int
    num_requests: int
    deadline_at: datetime | None
    keep_s: int | None
    created_at: datetime
    stopped_at: datetime | None

    @classmethod
    def of(cls, run: AgentRun) -> RunView:
        budget = None if run.budget_nano is None else dollars(run.budget_nano)
        return copy_fields(run, cls, budget_usd=budget, used_usd=dollars(run.used_nano))


class RunViews(msgspec.Struct, frozen=True):
    """The newest runs."""

    data: list[RunView]


class RunRequestView(msgspec.Struct, frozen=True):
    """One request of a run that was admitted. While its outcome is `open`, its tokens and cost are reserved."""

    request_id: str
    trace_id: str
    endpoint: str
    model: str
    started_at: datetime
    start_ms: float  # after the run's beginning
    duration_ms: float | None
    outcome: str
    error_code: str | None
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_usd: str


class RunTrace(msgspec.Struct, frozen=True):
    """A run with its requests in their order, as one trace."""

    run: RunView
    requests: list[RunRequestView]

    @classmethod
    def of(cls, run: AgentRun, requests: Sequence[AgentRunRequest]) -> RunTrace:
        shown = [
            copy_fields(
                one,
                RunRequestView,
                start_ms=(one.started_at - run.created_at).total_seconds() * 1000,
                cost_usd=dollars(one.nano),
            )
            for one in requests
        ]
        return cls(RunView.of(run), shown)
