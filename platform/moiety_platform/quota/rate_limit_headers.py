"""HTTP headers with the state of a request's limits. Pure.

`x-ratelimit-*` has OpenAI's form and meaning: the rates per minute, and when they are full again. `RateLimit` and
`RateLimit-Policy` (IETF draft-ietf-httpapi-ratelimit-headers-10) name every limit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from moiety_platform.quota.kinds import LimitKind, Meter, Period

_OPENAI_NAMES = {LimitKind.REQUESTS_PER_MINUTE: "requests", LimitKind.TOKENS_PER_MINUTE: "tokens"}
_PERIOD_S = {Period.DAY: 86_400, Period.MONTH: 30 * 86_400}


class LimitStatus(msgspec.Struct, frozen=True):
    """State of one limit: approximately how much is left, and in how many seconds it is full again.

    `whole_in_s` is None for open requests, whose end is unknown.
    """

    kind: LimitKind
    cap: int
    left: int
    whole_in_s: float | None


def headers(limit_statuses: Sequence[LimitStatus]) -> dict[str, str]:
    """Return the headers; of several limits of one kind, on different levels, the one with the least left counts."""
    tightest = {status.kind: status for status in limit_statuses}
    if len(tightest) < len(limit_statuses):
        for status in reversed(limit_statuses):
            if status.left <= tightest[status.kind].left:
                tightest[status.kind] = status
    if not tightest:
        return {}
    fields: dict[str, str] = {}
    for kind, name in _OPENAI_NAMES.items():
        rate = tightest.get(kind)
        if rate is not None:
            fields[f"x-ratelimit-limit-{name}"] = str(rate.cap)
            fields[f"x-ratelimit-remaining-{name}"] = str(rate.left)
            fields[f"x-ratelimit-reset-{name}"] = duration(rate.whole_in_s or 0.0)
    fields["ratelimit-policy"] = _policies(tuple([(status.kind, status.cap) for status in tightest.values()]))
    fields["ratelimit"] = ", ".join(
        [
            f'"{one.kind}";r={one.left}' + ("" if one.whole_in_s is None else f";t={round(one.whole_in_s)}")
            for one in tightest.values()
        ]
    )
    return fields


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's form: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"


@functools.lru_cache(maxsize=4096)
def _policies(limits: tuple[tuple[LimitKind, int], ...]) -> str:
    return ", ".join([_policy(kind, cap) for kind, cap in limits])


def _policy(kind: LimitKind, cap: int) -> str:
    window = 60 if kind.meter is Meter.RATE else _PERIOD_S[kind.period] if kind.period is not None else None
    return f'"{kind}";q={cap}' + ("" if window is None else f";w={window}")
