"""Random or evenly spaced arrivals, one tenant per stream; many tenants are many merged streams.

A process is a function (rng, duration_s) -> arrival times. The command's description has the form `NAME:key=value,…`,
with several joined by `;`:

| name | keys | arrivals |
|---|---|---|
| `poisson` | `rate` | independent, at a mean rate |
| `constant` | `rate` | evenly spaced, the first at a random phase |
| `onoff` | `rate`, `on`, `off` | Poisson for `on` seconds, none for `off` |
| `ramp` | `from`, `to` | Poisson whose rate changes linearly |
| `gamma` | `rate`, `cv` | gaps of a gamma distribution: bursts where cv is above 1 |
| `swing` | `low`, `high`, `period` | Poisson at the low and the high rate in turn, each for half a period |

All take `input` and `output` (tokens, or `LOW..HIGH` drawn uniformly), `tenant`, `class`, `weight`, and `tenants=N`,
which makes N tenants that share the rate equally. With `even=1`, `onoff`, `ramp` and `swing` are evenly spaced at their
rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from random import Random

from moiety_workload.errors import BadSpec
from moiety_workload.request import DEFAULT_CLASS, DEFAULT_TENANT, TraceRequest, Workload
from moiety_workload.transforms import by_arrival

_COMMON = {"input", "output", "tenant", "class", "weight", "tenants", "even"}
_KEYS = {
    "poisson": ("rate",),
    "constant": ("rate",),
    "onoff": ("rate", "on", "off"),
    "ramp": ("from", "to"),
    "gamma": ("rate", "cv"),
    "swing": ("low", "high", "period"),
}


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Range of token lengths, drawn uniformly from low to high."""

    low: int
    high: int

    def draw(self, rng: Random) -> int:
        return self.low if self.low == self.high else rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Stream:
    """Arrivals of one tenant. `settings` are the numbers of the process named `process`."""

    process: str
    settings: dict[str, float]
    input_tokens: LengthRange = LengthRange(256, 256)
    output_tokens: LengthRange = LengthRange(256, 256)
    tenant: str = DEFAULT_TENANT
    service_class: str = DEFAULT_CLASS
    weight: float = 1.0

    def draw(self, duration_s: float, seed: str) -> list[TraceRequest]:
        """Return the stream's requests before `duration_s`; the same for the same seed."""
        rng = Random(seed)
        times = self._gamma(rng, duration_s) if self.process == "gamma" else self._by_rate(rng, duration_s)
        return [
            TraceRequest(
                time_s, self.tenant, self.input_tokens.draw(rng), self.output_tokens.draw(rng), self.service_class
            )
            for time_s in times
        ]

    def _gamma(self, rng: Random, duration_s: float) -> list[float]:
        shape = 1 / self.settings["cv"] ** 2
        scale = 1 / (shape * self.settings["rate"])
        times, time_s = [], rng.random() * rng.gammavariate(shape, scale)
        while time_s < duration_s:
            times.append(time_s)
            time_s += rng.gammavariate(shape, scale)
        return times

    def _by_rate(self, rng: Random, duration_s: float) -> list[float]:
        """Return arrivals whose rate is a function of time.

        From one arrival to the next, the integral of the rate advances by 1 (evenly spaced) or by an exponential draw
        (Poisson). It is computed in small steps.
        """
        even = self.process == "constant" or bool(self.settings.get("even"))
        rate_at = self._rate(duration_s)
        step_s = min(0.05, duration_s / 100)
        wanted = rng.random() if even else rng.expovariate(1.0)
        times, done, number = [], 0.0, 0
        while (begin_s := number * step_s) < duration_s:
            rate = rate_at(begin_s + step_s / 2)
            while rate > 0 and done + rate * step_s >= wanted:
                time_s = begin_s + (wanted - done) / rate
                if time_s < duration_s:
                    times.append(time_s)
                wanted += 1.0 if even else rng.expovariate(1.0)
            done += rate * step_s
            number += 1
        return times

    def _rate(self, duration_s: float) -> Callable[[float], float]:
        settings = self.settings
        match self.process:
            case "onoff":
                on_s, cycle_s = settings["on"], settings["on"] + settings["off"]
                return lambda time_s: settings["rate"] if time_s % cycle_s < on_s else 0.0
            case "ramp":
                slope = (settings["to"] - settings["from"]) / duration_s
                return lambda time_s: settings["from"] + slope * time_s
            case "swing":
                period_s = settings["period"]
                return lambda time_s: settings["low" if time_s % period_s < period_s / 2 else "high"]
            case _:
                return lambda _: settings["rate"]


def generate(spec: str, duration_s: float, seed: int) -> Workload:
    """Return a workload from a description (see the table above). Raises BadSpec."""
    streams = [stream for part in spec.split(";") for stream in parse_stream(part)]
    drawn = (stream.draw(duration_s, f"stream {number} {seed}") for number, stream in enumerate(streams))
    requests = by_arrival(list(chain.from_iterable(drawn)))
    if not requests:
        raise BadSpec(f"{spec} creates no request in {duration_s:g} s; use a higher rate or a longer duration")
    weights = {stream.tenant: stream.weight for stream in streams if stream.weight != 1.0}
    return Workload(spec, tuple(requests), duration_s, weights=weights)


def draw_poisson(
    rng: Random, rate_per_s: float, num_requests: int, input_tokens: int, output_tokens: int
) -> list[TraceRequest]:
    """Return `num_requests` independent arrivals at a mean rate, all of one length."""
    arrival_s, requests = 0.0, []
    for _ in range(num_requests):
        requests.append(TraceRequest(arrival_s, DEFAULT_TENANT, input_tokens, output_tokens))
        arrival_s += rng.expovariate(rate_per_s)
    return requests


def parse_stream(spec: str) -> list[Stream]:
    """Return one stream, or N for `tenants=N`. Raises BadSpec."""
    name, _, rest = spec.strip().partition(":")
    if name not in _KEYS:
        raise BadSpec(f"{name!r} is not an arrival process; known are {', '.join(_KEYS)}")
    values = {}
    for part in filter(None, rest.split(",")):
        key, separator, value = part.partition("=")
        if not separator or key.strip() not in _COMMON | set(_KEYS[name]):
            known = ", ".join([*_KEYS[name], *sorted(_COMMON)])
            raise BadSpec(f"{part!r} in {spec!r} is not KEY=VALUE with a key of {known}")
        values[key.strip()] = value.strip()
    if missing := [key for key in _KEYS[name] if key not in values]:
        raise BadSpec(f"{spec!r} lacks {', '.join(missing)}")
    settings = {key: _number(spec, key, values[key]) for key in (*_KEYS[name], "even") if key in values}
    _check(spec, name, settings)
    num_tenants = int(_number(spec, "tenants", values.get("tenants", "1")))
    if num_tenants < 1:
        raise BadSpec(f"{spec!r}: tenants must be at least 1")
    base = values.get("tenant", DEFAULT_TENANT if num_tenants == 1 else "tenant")
    shared = {key: settings[key] / num_tenants for key in ("rate", "from", "to", "low", "high") if key in settings}
    return [
        Stream(
            name,
            settings | shared,
            _lengths(spec, values.get("input", "256")),
            _lengths(spec, values.get("output", "256")),
            base if num_tenants == 1 else f"{base}-{number:03d}",
            values.get("class", DEFAULT_CLASS),
            _number(spec, "weight", values.get("weight", "1")),
        )
        for number in range(num_tenants)
    ]


def _check(spec: str, name: str, settings: dict[str, float]) -> None:
    zero_allowed = {"from", "to", "low", "high", "off", "even"}
    for key, value in settings.items():
        if value < 0 or (value == 0 and key not in zero_allowed):
            raise BadSpec(f"{spec!r}: {key} must be above 0, not {value:g}")
    if name == "ramp" and settings["from"] == settings["to"] == 0:
        raise BadSpec(f"{spec!r}: a ramp from 0 to 0 creates no request")


def _number(spec: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as exc:
        raise BadSpec(f"{spec!r}: {key} must be a number, not {text!r}") from exc
    if not math.isfinite(value):
        raise BadSpec(f"{spec!r}: {key} must be a finite number, not {text!r}")
    return value


def _lengths(spec: str, text: str) -> LengthRange:
    low, separator, high = text.partition("..")
    try:
        lengths = LengthRange(int(low), int(high if separator else low))
    except ValueError as exc:
        raise BadSpec(f"{spec!r}: a length must be a number or LOW..HIGH, not {text!r}") from exc
    if not 1 <= lengths.low <= lengths.high:
        raise BadSpec(f"{spec!r}: lengths must be at least 1 and LOW at most HIGH, not {text!r}")
    return lengths
