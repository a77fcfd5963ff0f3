"""Rate limits in Anthropic's headers, made from OpenAI's, which every answer has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

NAMES = tuple(
    f"anthropic-ratelimit-{of}-{what}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
_DURATION = re.compile(r"(?:(?P<minutes>\d+)m)?(?:(?P<seconds>[\d.]+)s)?|(?P<milliseconds>\d+)ms")


def with_anthropic_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a response, and the same rate limits by Anthropic's names."""
    return {**headers, **anthropic_rate_limits(headers, datetime.now(UTC))} if headers else {}


def anthropic_rate_limits(headers: Mapping[str, str], now: datetime) -> dict[str, str]:
    """Return the rate limits by Anthropic's names. A reset is a time, in RFC 3339."""
    found = {}
    for of in ("requests", "tokens"):
        limit = headers.get(f"x-ratelimit-limit-{of}")
        if limit is not None:
            reset = now + timedelta(seconds=_seconds_of(headers[f"x-ratelimit-reset-{of}"]))
            found[f"anthropic-ratelimit-{of}-limit"] = limit
            found[f"anthropic-ratelimit-{of}-remaining"] = headers[f"x-ratelimit-remaining-{of}"]
            found[f"anthropic-ratelimit-{of}-reset"] = reset.isoformat(timespec="seconds").replace("+00:00", "Z")
    return found


def _seconds_of(duration: str) -> float:
    """Return the seconds of a duration in OpenAI's form, such as 20ms, 1.5s or 6m0s."""
    match = _DURATION.fullmatch(duration)
    assert match is not None, "made by `rate_limit_headers.duration`"
    minutes, seconds, milliseconds = (float(match[name] or 0) for name in ("minutes", "seconds", "milliseconds"))
    return minutes * 60 + seconds + milliseconds / 1000
