"""Bodies and responses of the admin API for contents of requests."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec

from moiety_platform.openapi.schemas import shows
from moiety_platform.request_contents.terms import MAX_KEEP_DAYS, MIN_KEEP_DAYS

KEEP_DAYS = shows(minimum=MIN_KEEP_DAYS, maximum=MAX_KEEP_DAYS)


class NewContentLogging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Opt-in of a tenant. Contents are kept for `keep_days` after their request."""

    keep_days: Annotated[int, KEEP_DAYS] = 7


class ContentLoggingView(msgspec.Struct, frozen=True):
    """Logging of the contents of a tenant's requests, and the days for which they are kept."""

    tenant_id: str
    is_on: bool
    keep_days: int | None
    set_at: datetime | None


class ContentView(msgspec.Struct, frozen=True):
    """Content of a logged request, without the secrets and card numbers that were found.

    `input` has a line for each part of the request's text, `outputs` the text of each answer. `is_cut` says that the
    rest of a long text is missing.
    """

    request_id: str
    tenant_id: str
    input: str
    outputs: list[str]
    is_cut: bool
    stored_at: datetime
    expires_at: datetime
