"""Response bodies of the admin API for the experts' load."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from moiety_platform.experts.sums import ExpertMinuteSum, LoadSum
from moiety_wire.experts import OTHER_TENANTS, ExpertLoad, unpack_counts


class TenantExperts(msgspec.Struct, frozen=True):
    """Number of a tenant's tokens that passed through the model.

    `tenant_id` is null for the sum of all tenants beyond the busiest; the name is null for that sum, and for a deleted
    tenant.
    """

    tenant_id: str | None
    tenant_name: str | None
    tokens: int


class ExpertPlaces(msgspec.Struct, frozen=True):
    """Placement of an engine's experts.

    `slots` has a row for each layer with experts: the expert of each slot, rank by rank. An expert can be in several
    slots.
    """

    engine_id: str
    parts: int
    slots: list[list[int]]

    @classmethod
    def of(cls, engine_id: str, load: ExpertLoad) -> ExpertPlaces:
        slots = unpack_counts(load.slots_LR).tolist()
        of_layer = len(slots) // len(load.layers)
        return cls(engine_id, load.num_parts, [slots[at : at + of_layer] for at in range(0, len(slots), of_layer)])


class ExpertMinute(msgspec.Struct, frozen=True):
    """One minute. Null fields had no picks, or belong to all tenants while the request is for one."""

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
    """Load of a model's experts.

    `picks` has a row for each of `layers`, the layers with experts, and a column for each expert: its tokens since
    `since`. `balancedness` is the mean load ÷ the largest, over layers and engines; 1 is even.
    `active_experts_by_layer` are the experts that a step used, of `num_experts`, in the listed minutes: the minutes of
    the last hour with picks. `layers` is empty for a model without experts.

    `places` contains the engines that move experts between ranks.

    A tenant's administrator sees only the picks of its tenant's tokens, and nothing about the engines.
    """

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
        """Build the view. `engines` are the reports of engines that the caller may see."""
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
    """Expert loads by model, over the last `window_minutes`; 0 means since the engines' start."""

    window_minutes: int
    data: list[ExpertView]
