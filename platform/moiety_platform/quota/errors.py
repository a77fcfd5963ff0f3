"""What a limit answers."""

from __future__ import annotations

from moiety_platform.errors import RateLimited


class QuotaExceeded(RateLimited):
    """A limit has no room for the request; `retry_after_s` is when its window ends."""

    default_code = "quota_exceeded"
