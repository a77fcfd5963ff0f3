"""What a limit answers."""

from __future__ import annotations

from moiety_platform.errors import RateLimited


class QuotaExceeded(RateLimited):
    """A limit has no room for the request, but for `room` of its unit; `retry_after_s` is when its window ends."""

    default_code = "quota_exceeded"

    def __init__(self, message: str, *, room: int, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.room = room
