"""Prediction of output lengths from a tenant's earlier outputs.

Each tenant has a histogram of output lengths, with bins that grow by a quarter and old outputs decayed. It is blended
with the histogram of all tenants while the tenant has few outputs. A length is recorded when the output has ended,
never before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import islice

_GROWTH = 1.25
_NUM_BINS = 64  # up to about a million tokens
_HALF_LIFE = 200  # outputs
_DECAY = 0.5 ** (1 / _HALF_LIFE)
_BLEND = 8.0  # weight of all tenants' outputs in a tenant's prediction, in outputs
_MAX_TENANTS = 10_000
_UNKNOWN_TOKENS = 128.0  # before the first output has ended


class _Histogram:
    __slots__ = ("counts", "first_bin", "scale", "sums", "total")

    def __init__(self) -> None:
        self.counts = [0.0] * _NUM_BINS
        self.first_bin = _NUM_BINS  # first one with outputs
        self.sums = [0.0] * _NUM_BINS
        self.total = 0.0
        self.scale = 1.0  # grows instead of decaying every bin

    def add(self, length: int) -> None:
        self.scale /= _DECAY
        index = _bin(length)
        self.counts[index] += self.scale
        self.first_bin = min(self.first_bin, index)
        self.sums[index] += self.scale * length
        self.total += self.scale
        if self.scale > 1e12:
            self.counts = [c / self.scale for c in self.counts]
            self.sums = [s / self.scale for s in self.sums]
            self.total /= self.scale
            self.scale = 1.0


class OutputPredictor:
    """Expected and high output lengths by tenant. `bias` multiplies every prediction, for experiments."""

    def __init__(self, *, bias: float = 1.0) -> None:
        self._bias = bias
        self._all = _Histogram()
        self._by_tenant: OrderedDict[str, _Histogram] = OrderedDict()
        self._newest_high: tuple[str, float, float] | None = None  # tenant, quantile and length; None: outdated

    def learn(self, tenant: str, num_output: int) -> None:
        """Record the length of an output that ended by itself."""
        if num_output <= 0:
            return
        self._newest_high = None
        self._all.add(num_output)
        own = self._by_tenant.get(tenant)
        if own is None:
            own = self._by_tenant[tenant] = _Histogram()
            if len(self._by_tenant) > _MAX_TENANTS:
                self._by_tenant.popitem(last=False)
        own.add(num_output)
        self._by_tenant.move_to_end(tenant)

    def expected(self, tenant: str, *, longer_than: int = 0, at_most: int) -> float:
        """Return the mean length of the tenant's outputs that are longer than `longer_than` tokens."""
        weight = total = 0.0
        first = _bin(longer_than + 1)
        for histogram, share in self._sources(tenant):
            weight += share * sum(histogram.counts[first:])
            total += share * sum(histogram.sums[first:])
        default = max(_UNKNOWN_TOKENS, 1.5 * longer_than)  # no output was longer: assume half as much again
        guess = total / weight if weight > 1e-6 else default
        return min(max(guess * self._bias, longer_than + 1.0), float(at_most))

    def high(self, tenant: str, quantile: float, *, at_most: int) -> int:
        """Return the length that this quantile of the tenant's outputs does not exceed."""
        newest = self._newest_high  # asked for again when the request joins
        if newest is None or newest[0] != tenant or newest[1] != quantile:
            newest = self._newest_high = tenant, quantile, self._quantile(tenant, quantile)
        length = newest[2]
        return at_most if length >= at_most else int(length)

    def _quantile(self, tenant: str, quantile: float) -> float:
        """Return the length for `high`; infinite if it is unknown beyond the longest bin."""
        (own, own_share), (everyone, share) = self._sources(tenant)
        whole = own_share * own.total + share * everyone.total
        if whole <= 1e-6:
            return 4 * _UNKNOWN_TOKENS
        seen, wanted = 0.0, quantile * whole
        first = everyone.first_bin
        of_bins = zip(islice(own.counts, first, None), islice(everyone.counts, first, None), strict=True)
        for index, (count, count_of_all) in enumerate(
            of_bins, start=first + 1
        ):  # plain: for every request that may join
            seen += own_share * count
            seen += share * count_of_all
            if seen >= wanted:
                return math.ceil(_GROWTH**index * self._bias)
        return math.inf

    def _sources(self, tenant: str) -> tuple[tuple[_Histogram, float], tuple[_Histogram, float]]:
        """Return the histograms of the tenant and of all tenants.

        Each comes with the factor that scales it to numbers of outputs.
        """
        everyone = self._all
        own = self._by_tenant.get(tenant)
        if not everyone.total:
            share = 0.0
        else:
            share = min(_BLEND, everyone.total / everyone.scale) / everyone.total
            if own is not None:  # the part of all tenants falls as the tenant's own outputs become many
                share /= 1.0 + own.total / own.scale
        return ((everyone, 0.0) if own is None else (own, 1 / own.scale)), (everyone, share)


def _bin(length: int) -> int:
    return min(_NUM_BINS - 1, int(math.log(max(length, 1)) / math.log(_GROWTH)))
