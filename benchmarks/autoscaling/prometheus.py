"""The part of Prometheus that the chart's queries need.

It keeps the gateways' /metrics of each scrape, and evaluates PromQL of these forms: rate of a selector, sum,
histogram_quantile, clamp_max, arithmetic, numbers.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_S = 15.0
KEEP_S = 1800.0

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


def _divided(one: float, other: float) -> float:
    """Divide as floating point does, without raising."""
    if other:
        return one / other
    return math.copysign(math.inf, one) if one else math.nan


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divided}


class UnknownQuery(ValueError):
    """Unsupported form of a query."""


class Prometheus:
    """Owner of the samples."""

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        self._parsed: dict[str, Any] = {}

    def scrape(self, now_s: float, exposition: str) -> None:
        """Store the metrics of a process."""
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                samples = self._series[sample.name][frozenset(sample.labels.items())]
                samples.append((now_s, sample.value))
                if samples[0][0] < now_s - KEEP_S:
                    del samples[0]

    def read(self, query: str, now_s: float) -> float:
        """Return the value of a query; 0 if there is none or it is NaN, as in KEDA. Raises UnknownQuery."""
        if query not in self._parsed:
            self._parsed[query] = promql.parse(query)
        found = self._evaluate(self._parsed[query], now_s)
        if isinstance(found, float):
            return found
        if len(found) > 1:
            raise UnknownQuery(f"{query} finds {len(found)} series, and an autoscaler wants one")
        value = next(iter(found.values()), 0.0)
        return 0.0 if math.isnan(value) or math.isinf(value) else value

    def _evaluate(self, node: Any, now_s: float) -> Vector | float:
        match node:
            case promql.NumberLiteral():
                return float(node.val)
            case promql.AggregateExpr() if str(node.op) == "sum":
                return _sum(self._vector(node.expr, now_s), node.modifier)
            case promql.Call() if node.func.name == "rate":
                return self._rate(node.args[0], now_s)
            case promql.Call() if node.func.name == "histogram_quantile":
                return _quantile(float(node.args[0].val), self._vector(node.args[1], now_s))
            case promql.Call() if node.func.name == "clamp_max":
                most = float(node.args[1].val)
                return {labels: min(value, most) for labels, value in self._vector(node.args[0], now_s).items()}
            case promql.BinaryExpr() if str(node.op) in OPERATORS:
                return self._combine(node, now_s)
        raise UnknownQuery(f"{type(node).__name__} {node} is not computed here")

    def _vector(self, node: Any, now_s: float) -> Vector:
        found = self._evaluate(node, now_s)
        if isinstance(found, float):
            raise UnknownQuery(f"{node} is a number, where series are needed")
        return found

    def _combine(self, node: Any, now_s: float) -> Vector | float:
        """Combine series with equal labels, or a series and a number."""
        apply = OPERATORS[str(node.op)]
        left, right = self._evaluate(node.lhs, now_s), self._evaluate(node.rhs, now_s)
        if isinstance(left, float):
            return apply(left, right) if isinstance(right, float) else {k: apply(left, v) for k, v in right.items()}
        if isinstance(right, float):
            return {labels: apply(value, right) for labels, value in left.items()}
        return {labels: apply(value, right[labels]) for labels, value in left.items() if labels in right}

    def _chosen(self, selector: Any) -> Mapping[Labels, list[tuple[float, float]]]:
        wanted = [(one.name, str(one.op).rpartition(".")[2], one.value) for one in selector.matchers.matchers]
        found = self._series.get(selector.name, {})
        return {labels: samples for labels, samples in found.items() if _fits(dict(labels), wanted)}

    def _rate(self, matrix: Any, now_s: float) -> Vector:
        """Return the rate as Prometheus computes it.

        This is the increase between the first and the last sample of the range, extrapolated to its ends by at most
        half the distance of two samples.
        """
        range_s = matrix.range.total_seconds()
        found = {}
        for labels, samples in self._chosen(matrix.vector_selector).items():
            inside = [one for one in samples if now_s - range_s < one[0] <= now_s]
            if len(inside) > 1:
                found[labels] = _extrapolated(inside, now_s - range_s, now_s) / range_s
        return found


def _extrapolated(samples: list[tuple[float, float]], start_s: float, end_s: float) -> float:
    increase = samples[-1][1] - samples[0][1]  # counters of this trace never begin again
    sampled_s = samples[-1][0] - samples[0][0]
    between_s = sampled_s / (len(samples) - 1)
    before_s, after_s = samples[0][0] - start_s, end_s - samples[-1][0]
    if increase > 0 and samples[0][1] >= 0:
        before_s = min(before_s, sampled_s * samples[0][1] / increase)  # not below nothing
    reach_s = sum(part if part < between_s * 1.1 else between_s / 2 for part in (before_s, after_s))
    return increase * (sampled_s + reach_s) / sampled_s


def _fits(labels: Mapping[str, str], wanted: list[tuple[str, str, str]]) -> bool:
    for name, how, value in wanted:
        mine = labels.get(name, "")
        matches = mine == value if how.endswith("Equal") else re.fullmatch(value, mine) is not None
        if matches == how.startswith("Not"):
            return False
    return True


def _sum(vector: Vector, modifier: Any) -> Vector:
    kept = set() if modifier is None else set(modifier.labels)
    sums: Vector = defaultdict(float)
    for labels, value in vector.items():
        sums[frozenset(one for one in labels if one[0] in kept)] += value
    return dict(sums)


def _quantile(share: float, buckets: Vector) -> Vector:
    """Interpolate linearly within the quantile's bucket; return the last bound beyond all buckets."""
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, count in buckets.items():
        bounds = dict(labels)
        groups[frozenset(one for one in labels if one[0] != "le")].append((float(bounds["le"]), count))
    return {labels: _quantile_of(share, sorted(rows)) for labels, rows in groups.items()}


def _quantile_of(share: float, rows: list[tuple[float, float]]) -> float:
    total = rows[-1][1]
    if not total:
        return math.nan
    rank = share * total
    index = next(number for number, (_, count) in enumerate(rows) if count >= rank)
    if index == len(rows) - 1:
        return rows[-2][0]
    low, below = rows[index - 1] if index else (0.0, 0.0)
    bound, count = rows[index]
    return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
