"""Sum of the expert loads of a model's engines. Pure.

Balancedness = Σ of the mean loads ÷ Σ of the largest, over layers and engines: 1 where all experts of a layer get the
same load, and 1 ÷ experts where one expert gets all (as in DeepSeek's EPLB, with one expert per rank).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moiety_wire.experts import ExpertInterval, ExpertLoad, unpack_counts


@dataclass(slots=True)
class Evenness:
    """Per layer, the picks of all its experts, and the picks of the busiest expert of each engine."""

    num_experts: int
    picks_L: list[int]
    busiest_L: list[int]

    @classmethod
    def of_nothing(cls, num_layers: int, num_experts: int) -> Evenness:
        return cls(num_experts, [0] * num_layers, [0] * num_layers)

    def add(self, picks_L: Sequence[int], busiest_L: Sequence[int]) -> None:
        self.picks_L = [have + more for have, more in zip(self.picks_L, picks_L, strict=True)]
        self.busiest_L = [have + more for have, more in zip(self.busiest_L, busiest_L, strict=True)]

    @property
    def by_layer(self) -> list[float | None]:
        """Balancedness of each layer; None where nothing was picked."""
        return [self._ratio(picks, busiest) for picks, busiest in zip(self.picks_L, self.busiest_L, strict=True)]

    @property
    def total(self) -> float | None:
        return self._ratio(sum(self.picks_L), sum(self.busiest_L))

    def _ratio(self, picks: int, busiest: int) -> float | None:
        return round(picks / self.num_experts / busiest, 4) if busiest else None


@dataclass(slots=True)
class ExpertMinuteSum:
    """One minute, summed over all engines of a model."""

    evenness: Evenness
    steps: int = 0
    active: int = 0  # active experts, over all steps and layers


@dataclass(slots=True)
class LoadSum:
    """Sum over the engines of one model with the same experts."""

    first: ExpertLoad
    picks: list[int]
    evenness: Evenness
    tokens_of: Counter[str] = field(default_factory=Counter)
    minutes: dict[int, ExpertMinuteSum] = field(default_factory=dict)
    active_L: list[int] = field(default_factory=list)
    steps: int = 0
    since_unix_s: int = 0
    as_of_unix_s: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.first.layers)

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of.values())

    @property
    def picks_by_layer(self) -> list[list[int]]:
        size = self.first.num_experts
        return [self.picks[layer * size : (layer + 1) * size] for layer in range(self.num_layers)]


def sum_loads(loads: Iterable[ExpertLoad]) -> LoadSum | None:
    """Return the sum of the loads with the same experts as the first; None of no loads.

    Raises ValueError for a load that is not packed according to the protocol.
    """
    total: LoadSum | None = None
    for load in loads:
        if total is None:
            total = _nothing(load)
        if (load.layers, load.num_experts) == (total.first.layers, total.first.num_experts):
            _add(total, load)
    return total


def _nothing(load: ExpertLoad) -> LoadSum:
    num_layers = len(load.layers)
    return LoadSum(
        first=load,
        picks=[0] * (num_layers * load.num_experts),
        evenness=Evenness.of_nothing(num_layers, load.num_experts),
        active_L=[0] * num_layers,
        since_unix_s=load.since_unix_s,
        as_of_unix_s=load.as_of_unix_s,
    )


def _add(total: LoadSum, load: ExpertLoad) -> None:
    total.since_unix_s = min(total.since_unix_s, load.since_unix_s)
    total.as_of_unix_s = max(total.as_of_unix_s, load.as_of_unix_s)
    if not load.layers:
        return
    size, picks = load.num_experts, unpack_counts(load.picks_LE)
    total.picks = [have + more for have, more in zip(total.picks, picks, strict=True)]
    rows = [picks[begin : begin + size] for begin in range(0, len(picks), size)]
    total.evenness.add([sum(row) for row in rows], [max(row) for row in rows])
    for tenant in load.tenants:
        total.tokens_of[tenant.tenant_id] += tenant.tokens
    for interval in load.intervals:
        _add_minute(total, interval)


def _add_minute(total: LoadSum, interval: ExpertInterval) -> None:
    minute = total.minutes.get(interval.at_unix_s)
    if minute is None:
        empty = Evenness.of_nothing(total.num_layers, total.first.num_experts)
        minute = total.minutes[interval.at_unix_s] = ExpertMinuteSum(empty)
    minute.evenness.add(unpack_counts(interval.picks_L), unpack_counts(interval.busiest_L))
    if interval.steps:
        active_L = unpack_counts(interval.active_L)
        minute.steps += interval.steps
        minute.active += sum(active_L)
        total.steps += interval.steps
        total.active_L = [have + more for have, more in zip(total.active_L, active_L, strict=True)]
