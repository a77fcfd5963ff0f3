"""Experts' load as administrators see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from moiety_platform.experts.sums import LoadSum, MinuteSum
from moiety_wire.experts import OTHER_TENANTS


class TenantExperts(msgspec.Struct, frozen=True):
    """How many tokens of a tenant went through the model. `tenant_id` is null for all tenants beyond the busiest
    together; the name is null for those as well, and for a tenant that there is no more."""

    tenant_id: str | None
    tenant_name: str | None
    tokens: int


class ExpertMinute(msgspec.Struct, frozen=True):
    """One minute. What is null was not picked, or belongs to all tenants and you ask for one."""

    at: datetime
    tokens: int
    balancedness: float | None
    balancedness_by_layer: list[float | None]
    active_experts: float | None

    @classmethod
    def of(cls, at_unix_s: int, minute: MinuteSum, picks_a_token: int) -> ExpertMinute:
        even = minute.evenness
        steps = minute.steps * len(even.picks_L)
        return cls(
            datetime.fromtimestamp(at_unix_s, UTC),
            sum(even.picks_L) // picks_a_token,
            even.total,
            even.by_layer,
            round(minute.active / steps, 2) if steps else None,
        )


class ExpertView(msgspec.Struct, frozen=True):
    """A model's experts. `picks` has a row for each of `layers`, the layers that have experts, and a column for each
    expert: how many tokens went there, since `since`. `balancedness` is the mean load ÷ the largest, over layers and
    engines: 1 is even. `active_experts_by_layer` are those that a step used, of `num_experts`, in the minutes that are
    listed: those of the last hour in which anything was picked. `layers` is empty for a model without experts.

    A tenant's administrator sees the picks of its tenant's tokens alone, and nothing of the engines."""

    model: str
    engine_ids: list[str]
    num_silent: int
    since: datetime
    as_of: datetime
    layers: list[int]
    num_experts: int
    experts_per_token: int
    expert_bytes: int
    tokens: int
    picks: list[list[int]]
    balancedness: float | None
    balancedness_by_layer: list[float | None]
    active_experts_by_layer: list[float] | None
    tenants: list[TenantExperts]
    minutes: list[ExpertMinute]

    @classmethod
    def of(
        cls, model: str, engine_ids: Sequence[str], num_silent: int, total: LoadSum, names: Mapping[str, str]
    ) -> ExpertView:
        first = total.first
        picks_a_token = max(1, total.num_layers * first.top_k)
        shares = [round(active / total.steps, 2) for active in total.active_L] if total.steps else None
        return cls(
            model=model,
            engine_ids=list(engine_ids),
            num_silent=num_silent,
            since=datetime.fromtimestamp(total.since_unix_s, UTC),
            as_of=datetime.fromtimestamp(total.as_of_unix_s, UTC),
            layers=list(first.layers),
            num_experts=first.num_experts,
            experts_per_token=first.top_k,
            expert_bytes=first.expert_bytes,
            tokens=total.tokens,
            picks=total.picks_by_layer,
            balancedness=total.evenness.total,
            balancedness_by_layer=total.evenness.by_layer,
            active_experts_by_layer=shares,
            tenants=[
                TenantExperts(None if one == OTHER_TENANTS else one, names.get(one), tokens)
                for one, tokens in total.tokens_of.most_common()
            ],
            minutes=[ExpertMinute.of(at, minute, picks_a_token) for at, minute in sorted(total.minutes.items())],
        )


class ExpertReport(msgspec.Struct, frozen=True):
    """The models that engines tell of, and of which minutes: 0 stands for all since the engines' start."""

    window_minutes: int
    data: list[ExpertView]
