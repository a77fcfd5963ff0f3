"""Experts' load as administrators see it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from moiety_platform.experts.sums import ExpertMinuteSum, LoadSum
from moiety_wire.experts import OTHER_TENANTS, ExpertLoad, unpack_counts


class TenantExperts(msgspec.Struct, frozen=True):
    """How many tokens of a tenant went through the model. `tenant_id` is null for all tenants beyond the busiest
    together; the name is null for those as well, and for a tenant that there is no more."""

    tenant_id: str | None
    tenant_name: str | None
    tokens: int


class ExpertPlaces(msgspec.Struct, frozen=True):
    """Where an engine's experts are: `slots` has a row for each layer that has experts, and in it the expert of each
    slot, one part's slots after the other's. An expert may be in several."""

    engine_id: str
    parts: int
    slots: list[list[int]]

    @classmethod
    def of(cls, engine_id: str, load: ExpertLoad) -> ExpertPlaces:
        slots = unpack_counts(load.slots_LR).tolist()
        of_layer = len(slots) // len(load.layers)
        return cls(engine_id, load.num_parts, [slots[at : at + of_layer] for at in range(0, len(slots), of_layer)])


class ExpertMinute(msgspec.Struct, frozen=True):
    """One minute. What is null was not picked, or belongs to all tenants and you ask for one."""

    at: datetime
    tokens: int
    balancedness: float | None
    balancedness_by_layer: list[float | None]
    active_experts: float | None

    @classmethod
    def of(cls, at_unix_s: int, minute: ExpertMinuteSum, picks_a_token: int) -> ExpertMinute:
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

    `places` are those of engines that move experts between ranks.

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
    places: list[ExpertPlaces]

    @classmethod
    def of(
        cls,
        model: str,
        engines: Mapping[str, ExpertLoad],
        num_silent: int,
        total: LoadSum,
        names: Mapping[str, str],
    ) -> ExpertView:
        """`engines`: what each said, where that may be told."""
        first = total.first
        picks_a_token = max(1, total.num_layers * first.top_k)
        shares = [round(active / total.steps, 2) for active in total.active_L] if total.steps else None
        return cls(
            model=model,
            engine_ids=list(engines),
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
            places=[ExpertPlaces.of(one, load) for one, load in engines.items() if load.num_parts],
        )


class ExpertReport(msgspec.Struct, frozen=True):
    """The models that engines tell of, and of which minutes: 0 stands for all since the engines' start."""

    window_minutes: int
    data: list[ExpertView]
