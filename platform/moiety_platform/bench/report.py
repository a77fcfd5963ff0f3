"""Figures of a benchmark run: latencies, SLO attainment per class, goodput. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moiety_platform.bench.load import BenchAnswer
from moiety_wire.classes import SHIPPED, STANDARD, ServiceClass

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class SloTarget:
    """SLO of a class: limits on TTFT and TPOT, or a limit on the completion time.

    The TTFT limit is `ttft_s` plus `ttft_s_per_1k` per 1,000 prompt tokens; `tpot_s` limits the mean time of the other
    tokens.
    """

    ttft_s: float | None = None
    ttft_s_per_1k: float = 0.0
    tpot_s: float | None = None
    completion_s: float | None = None

    def is_attained(self, answer: BenchAnswer) -> bool:
        if answer.error is not None or answer.first_token_s is None:
            return False
        tpot_s = time_per_token_s(answer)
        limit_s = None if self.ttft_s is None else self.ttft_s + self.ttft_s_per_1k * answer.request.input_tokens / 1000
        return (
            (limit_s is None or answer.first_token_s <= limit_s)
            and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)
            and (self.completion_s is None or answer.end_s <= self.completion_s)
        )


def slo_targets_of(classes: Iterable[ServiceClass]) -> dict[str, SloTarget]:
    """Return the SLO of each class by name."""
    return {
        service.name: SloTarget(service.ttft_s, service.ttft_per_1k_s, service.tpot_s, service.completion_s)
        for service in classes
    }


SLO_TARGETS = slo_targets_of(SHIPPED)


def time_per_token_s(answer: BenchAnswer) -> float | None:
    """Return the mean time per output token after the first; None for answers of fewer than two tokens."""
    if answer.first_token_s is None or answer.last_token_s is None or answer.output_tokens < 2:
        return None
    return (answer.last_token_s - answer.first_token_s) / (answer.output_tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile by linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread_ms(values_s: Iterable[float | None]) -> dict[str, float | None]:
    """Return p50, p90 and p99 in milliseconds; None where nothing was measured."""
    known = [value for value in values_s if value is not None]
    return {f"p{percent}": round(percentile(known, percent) * 1000, 3) if known else None for percent in PERCENTILES}


def summarise(answers: Sequence[BenchAnswer], targets: Mapping[str, SloTarget] = SLO_TARGETS) -> dict[str, Any]:
    """Return the figures of a run. Latencies cover served requests only; attainment counts the others as missed.

    `targets`: the SLO of each class. A class that is not in it gets the SLO of the standard class.
    """
    served = [answer for answer in answers if answer.error is None]
    duration_s = max((answer.request.arrival_s + answer.end_s for answer in answers), default=0.0)
    attained = [answer for answer in answers if slo_target_of(answer, targets).is_attained(answer)]
    classes = sorted({answer.request.service_class for answer in answers})
    return {
        "duration_s": round(duration_s, 3),
        "requests": len(answers),
        "completed": len(served),
        "errors": len(answers) - len(served),
        "errors_by_code": dict(Counter(answer.error for answer in answers if answer.error is not None)),
        "error_messages": {answer.error: answer.message for answer in reversed(answers) if answer.error is not None},
        "requests_per_s": rate(len(served), duration_s),
        "input_tokens_per_s": rate(sum(answer.input_tokens for answer in served), duration_s),
        "output_tokens_per_s": rate(sum(answer.output_tokens for answer in served), duration_s),
        "goodput_tokens_per_s": rate(sum(answer.output_tokens for answer in attained), duration_s),
        **latencies(served),
        "classes": {name: summarise_class(name, answers, targets) for name in classes},
        "send_delay_ms": spread_ms(answer.late_s for answer in answers),
    }


def summarise_class(name: str, answers: Sequence[BenchAnswer], targets: Mapping[str, SloTarget]) -> dict[str, Any]:
    members = [answer for answer in answers if answer.request.service_class == name]
    attained = sum(slo_target_of(answer, targets).is_attained(answer) for answer in members)
    served = [answer for answer in members if answer.error is None]
    return {"requests": len(members), "attainment": round(attained / len(members), 6), **latencies(served)}


def latencies(served: Sequence[BenchAnswer]) -> dict[str, Any]:
    return {
        "ttft_ms": spread_ms(answer.first_token_s for answer in served),
        "tpot_ms": spread_ms(time_per_token_s(answer) for answer in served),
        "e2e_ms": spread_ms(answer.end_s for answer in served),
    }


def slo_target_of(answer: BenchAnswer, targets: Mapping[str, SloTarget]) -> SloTarget:
    return targets.get(answer.request.service_class, targets[STANDARD.name])


def rate(count: float, duration_s: float) -> float:
    return round(count / duration_s, 3) if duration_s > 0 else 0.0
