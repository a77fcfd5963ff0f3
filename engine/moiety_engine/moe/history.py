"""History of expert load: since the start, and per minute for the last hour. Handles no tensors and no device.

L layers with experts, E experts, Q quantiles.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moiety_engine.moe.shape import ExpertShape
from moiety_wire.experts import (
    OTHER_TENANTS,
    QUANTILES,
    ExpertBalance,
    ExpertInterval,
    ExpertLoad,
    TenantTokens,
    pack_counts,
    pack_shares,
)

INTERVAL_S = 60
NUM_INTERVALS = 60
BALANCE_MINUTES = 5  # period that the reported balance covers


@dataclass(frozen=True, slots=True)
class ExpertPace:
    """Expert load of some steps that were counted together.

    `active`: experts of a layer that a step picked at all, mean over layers and steps. `balancedness`: mean picks of an
    expert as a share of the picks of the busiest expert.
    """

    active: float
    balancedness: float

    @classmethod
    def of(cls, picks_LE: np.ndarray, active_L: np.ndarray, steps: int) -> ExpertPace:
        largest = max(int(picks_LE.max(axis=1).sum()), 1)
        return cls(float(active_L.mean()) / max(steps, 1), float(picks_LE.mean(axis=1).sum()) / largest)


@dataclass(slots=True)
class _Minute:
    """Counts of one interval that begins at `at_unix_s`."""

    at_unix_s: int
    picks_LE: np.ndarray  # of all tenants
    active_L: np.ndarray
    steps: int = 0
    picks_of: dict[str, np.ndarray] = field(default_factory=dict)
    tokens_of: Counter[str] = field(default_factory=Counter)
    interval_of_all: ExpertInterval | None = None  # cached report of all tenants, once the interval is over

    def interval(self, picks_LE: np.ndarray, *, of_all: bool) -> ExpertInterval:
        return ExpertInterval(
            self.at_unix_s,
            self.steps if of_all else 0,
            pack_counts(picks_LE.sum(axis=1).tolist()),
            pack_counts(picks_LE.max(axis=1).tolist()),
            pack_counts(self.active_L.tolist() if of_all else ()),
        )


class LoadHistory:
    """Owner of the expert load counts read so far. Used by the step loop's thread only."""

    def __init__(self, shape: ExpertShape, now_s: float) -> None:
        self.shape = shape
        self._zeros_LE = np.zeros((len(shape.layers), shape.num_experts), dtype=np.int64)
        self._since_s = self._as_of_s = int(now_s)
        self._picks_of: dict[str, np.ndarray] = {}  # since the start, like the next two
        self._picks_LE = self._zeros_LE.copy()
        self._tokens_of: Counter[str] = Counter()
        self._minutes: deque[_Minute] = deque(maxlen=NUM_INTERVALS)
        self.balance(now_s)  # numpy's first quantiles are slow: compute them before any step waits for them

    def add(self, picks_of: Mapping[str, np.ndarray], active_L: np.ndarray, steps: int, now_s: float) -> None:
        """Add the picks counted up to now, by tenant, and the active experts of `steps` steps."""
        self._as_of_s = int(now_s)
        minute = self._minute(int(now_s) // INTERVAL_S * INTERVAL_S)
        minute.steps += steps
        minute.active_L += active_L
        for tenant_id, picks_LE in picks_of.items():
            minute.picks_LE += picks_LE
            self._picks_LE += picks_LE
            tokens = int(picks_LE[0].sum()) // self.shape.top_k
            minute.tokens_of[tenant_id] += tokens
            self._tokens_of[tenant_id] += tokens
            self._picks_of[tenant_id] = self._picks_of.get(tenant_id, 0) + picks_LE
            minute.picks_of[tenant_id] = minute.picks_of.get(tenant_id, 0) + picks_LE.astype(np.uint32)

    def keep_only_tenants(self, tenants: Iterable[str]) -> None:
        """Keep separate sums since the start for these tenants only; merge those of all others into one."""
        leaving = set(self._picks_of) - set(tenants) - {OTHER_TENANTS}
        if leaving:
            others_LE = self._picks_of.get(OTHER_TENANTS, self._zeros_LE)
            self._picks_of[OTHER_TENANTS] = others_LE + sum(self._picks_of.pop(one) for one in leaving)
            self._tokens_of[OTHER_TENANTS] += sum(self._tokens_of.pop(one) for one in leaving)

    def load(self, query_id: int, minutes: int, tenant_id: str | None, now_s: float) -> ExpertLoad:
        """Return the reply to an ExpertLoadQuery message."""
        shape = self.shape
        recent = [one for one in self._minutes if one.at_unix_s > now_s - INTERVAL_S * (minutes or NUM_INTERVALS)]
        if tenant_id is None:
            intervals = [self._interval_of(one) for one in recent]
        else:
            own = ((one, one.picks_of.get(tenant_id)) for one in recent)
            intervals = [one.interval(picks_LE, of_all=False) for one, picks_LE in own if picks_LE is not None]
        first_s = max(self._since_s, (int(now_s) // INTERVAL_S - minutes + 1) * INTERVAL_S)
        tokens_of = sum((one.tokens_of for one in recent), Counter[str]()) if minutes else self._tokens_of
        return ExpertLoad(
            query_id=query_id,
            since_unix_s=first_s if minutes else self._since_s,
            as_of_unix_s=self._as_of_s,
            layers=shape.layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            picks_LE=pack_counts(self._sum(recent if minutes else None, tenant_id).ravel().tolist()),
            intervals=intervals,
            tenants=[TenantTokens(*one) for one in sorted(tokens_of.items()) if tenant_id in (None, one[0])],
            expert_bytes=shape.expert_bytes,
            num_groups=shape.num_groups,
        )

    def _sum(self, minutes: Sequence[_Minute] | None, tenant_id: str | None) -> np.ndarray:
        """Return the picks of a tenant, or of all tenants, in these minutes or since the start, [L, E]."""
        if minutes is None:
            return self._picks_LE if tenant_id is None else self._picks_of.get(tenant_id, self._zeros_LE)
        parts = (one.picks_LE if tenant_id is None else one.picks_of.get(tenant_id) for one in minutes)
        return sum((part for part in parts if part is not None), self._zeros_LE)

    def _interval_of(self, minute: _Minute) -> ExpertInterval:
        if minute is self._minutes[-1]:
            return minute.interval(minute.picks_LE, of_all=True)
        if minute.interval_of_all is None:
            minute.interval_of_all = minute.interval(minute.picks_LE, of_all=True)
        return minute.interval_of_all

    def balance(self, now_s: float) -> ExpertBalance:
        """Return how evenly the picks of the last BALANCE_MINUTES were distributed over the experts."""
        recent = [one for one in self._minutes if one.at_unix_s > now_s - INTERVAL_S * BALANCE_MINUTES]
        picks_LE = sum((one.picks_LE for one in recent), self._zeros_LE)
        mean_L, largest_L = picks_LE.mean(axis=1), picks_LE.max(axis=1)
        active_L = sum((one.active_L for one in recent), np.zeros(len(self.shape.layers)))
        at_least_one_L = np.maximum(mean_L, 1 / self.shape.num_experts)  # a layer without picks has no quantiles
        quantiles_LQ = np.quantile(picks_LE, QUANTILES, axis=1).T / at_least_one_L[:, None]
        return ExpertBalance(
            minutes=BALANCE_MINUTES,
            layers=self.shape.layers,
            picks_total=int(self._picks_LE.sum()),
            balancedness=float(mean_L.sum() / max(largest_L.sum(), 1)),
            balancedness_L=pack_shares((mean_L / np.maximum(largest_L, 1)).tolist()),
            quantiles_LQ=pack_shares(quantiles_LQ.ravel().tolist()),
            active_L=pack_shares((active_L / max(sum(one.steps for one in recent), 1)).tolist()),
        )

    def _minute(self, at_unix_s: int) -> _Minute:
        if not self._minutes or at_unix_s > self._minutes[-1].at_unix_s:  # a clock that is set back changes nothing
            self._minutes.append(
                _Minute(at_unix_s, self._zeros_LE.copy(), np.zeros(len(self.shape.layers), dtype=np.int64))
            )
        return self._minutes[-1]
