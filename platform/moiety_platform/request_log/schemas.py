"""Response schemas of the admin API for the request log."""

from __future__ import annotations

from moiety_platform.db.paging import Page
from moiety_platform.usage.schemas import RequestView


class LoggedRequest(RequestView, frozen=True):
    """One request of the log.

    `has_trace` says whether the trace store has a trace of the request now; null if the trace store does not answer.
    """

    has_trace: bool | None


class LoggedRequestPage(Page[LoggedRequest], frozen=True):
    """A page of requests, newest first; `next_cursor` is null on the last page."""

    def without_expert_bytes(self) -> LoggedRequestPage:
        """Return the page for an administrator of one tenant, without figures that depend on other tenants."""
        return LoggedRequestPage([one.without_expert_bytes() for one in self.data], self.next_cursor)
