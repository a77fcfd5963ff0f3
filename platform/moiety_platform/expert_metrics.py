"""Prometheus metrics of the experts' load balance, read at each scrape from the engines' last reports.

Labels are bounded: engines, a model's layers, four quantiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.engine_client.base import EngineState
from moiety_wire.experts import QUANTILES, ExpertBalance, unpack_shares

_LAYER = ("engine", "layer")


class ExpertCollector(Collector):
    """Collector of all engines in `states` whose model has experts."""

    def __init__(self, states: Callable[[], Sequence[EngineState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        reports = [(state.address, state.balance) for state in self._states() if state.balance is not None]
        picks = CounterMetricFamily(
            "moiety_expert_picks", "Tokens that layers routed to experts, since the engine's start.", labels=("engine",)
        )
        balance = GaugeMetricFamily(
            "moiety_expert_balancedness",
            "Mean expert load divided by the largest, over all layers, last 5 minutes; 1 is perfectly balanced.",
            labels=("engine",),
        )
        for address, one in reports:
            picks.add_metric((address,), one.picks_total)
            balance.add_metric((address,), one.balancedness)
        yield from (picks, balance, *self._by_layer(reports))

    def _by_layer(self, reports: Sequence[tuple[str, ExpertBalance]]) -> Iterator[Metric]:
        evenness = GaugeMetricFamily(
            "moiety_expert_layer_balancedness",
            "Mean expert load of a layer divided by the largest, last 5 minutes.",
            labels=_LAYER,
        )
        active = GaugeMetricFamily(
            "moiety_expert_active", "Active experts of a layer in a step, mean of the last 5 minutes.", labels=_LAYER
        )
        load = GaugeMetricFamily(
            "moiety_expert_load_ratio",
            "Load of a layer's experts at a quantile, divided by their mean, last 5 minutes.",
            labels=(*_LAYER, "quantile"),
        )
        for address, one in reports:
            quantiles = iter(unpack_shares(one.quantiles_LQ))
            rows = zip(one.layers, unpack_shares(one.balancedness_L), unpack_shares(one.active_L), strict=True)
            for layer, even, used in rows:
                evenness.add_metric((address, str(layer)), even)
                active.add_metric((address, str(layer)), used)
                for quantile in QUANTILES:
                    load.add_metric((address, str(layer), f"{quantile:g}"), next(quantiles))
        yield from (evenness, active, load)
