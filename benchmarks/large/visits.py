"""Pages of the dashboard as its server renders them: the script of each page, run against a real gateway."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import ElementTree
from streamlit.util import calc_hash

from moiety_dashboard import session
from moiety_dashboard import settings as dashboard_settings
from moiety_dashboard.client import ADMIN
from moiety_dashboard.views import PAGES

SCRIPT = Path(dashboard_settings.__file__).parent / "app.py"
TIMEOUT_S = 60
VISIT_EVERY_S = 3.0
_BEGUN = "moiety_begun"
TENANT = "the tenant"  # in place of its id
_BY_ID = ("/traces/", "/tenants/", "/simulations/")

View = tuple[str, dict[str, str | None], str]
ANY: dict[str, str | None] = {"trace class": None, "trace outcome": None}
ANY_REQUEST: dict[str, str | None] = {"log outcome": None, "log end user": ""}

# what of a page is looked at: its path, what its widgets are set to, and whether its address names a tenant or a trace
VIEWS: dict[str, View] = {
    "overview, 15 min": ("overview", {"window": "15 min"}, ""),
    "overview, 1 h": ("overview", {"window": "1 h"}, ""),
    "overview, 6 h": ("overview", {"window": "6 h"}, ""),
    "overview, 24 h": ("overview", {"window": "24 h"}, ""),
    "tenants, 1 h": ("tenants", {"long": "1 h"}, ""),
    "tenants, 24 h": ("tenants", {"long": "24 h"}, ""),
    "tenants, 7 d": ("tenants", {"long": "7 d"}, ""),
    "tenants, 30 d": ("tenants", {"long": "30 d"}, ""),
    "one tenant's usage": ("tenants", {"part": "Usage", "long": "24 h"}, "tenant"),
    "one tenant's end users, 30 d": (
        "tenants", {"part": "End users and tags", "long": "24 h", "attribution time": "30 d"}, "tenant",
    ),
    "one tenant's quotas": ("tenants", {"part": "Quotas", "long": "24 h"}, "tenant"),
    "one tenant's keys": ("tenants", {"part": "Keys", "long": "24 h"}, "tenant"),
    "one tenant's settings": ("tenants", {"part": "Settings", "long": "24 h"}, "tenant"),
    "traces, 1 h": ("traces", {"trace window": "1 h", **ANY}, ""),
    "traces, 7 d": ("traces", {"trace window": "7 d", **ANY}, ""),
    "failed traces of a class, 7 d": (
        "traces", {"trace window": "7 d", "trace class": "standard", "trace outcome": "failed"}, "",
    ),
    "one trace": ("traces", {}, "trace"),
    "spend by tenant, this month": (
        "spend", {"spend time": "This month", "spend by": "tenant", "spend tenant": None}, "",
    ),
    "spend by key, 90 d": ("spend", {"spend time": "90 d", "spend by": "key", "spend tenant": None}, ""),
    "spend of one tenant by end user, 30 d": (
        "spend", {"spend time": "30 d", "spend by": "end_user", "spend tenant": TENANT}, "",
    ),
    "requests, 1 h": ("requests", {"log window": "1 h", **ANY_REQUEST}, ""),
    "failed requests, 30 d": ("requests", {**ANY_REQUEST, "log window": "30 d", "log outcome": "failed"}, ""),
    "requests of an end user, 30 d": (
        "requests", {**ANY_REQUEST, "log window": "30 d", "log end user": "user-7@example.com"}, "",
    ),
}  # fmt: skip


def all_views() -> dict[str, View]:
    """Return the views above, and every other page as it opens."""
    known = {path for path, _, _ in VIEWS.values()}
    return VIEWS | {view.title.lower(): (view.path, {}, "") for view in PAGES if view.path not in known}


class Visitor:
    """A signed-in user who looks at pages.

    `tenant_id` is the tenant whose details are shown; of the traces it is the longest of the newest.
    """

    def __init__(self, gateway: str, admin_key: str, tenant_id: str) -> None:
        sys.argv = [str(SCRIPT), "--gateway", gateway]
        found = httpx.get(
            f"{gateway}{ADMIN}/traces",
            params={"limit": 100},
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=TIMEOUT_S,
        ).raise_for_status()
        longest = max(found.json()["data"], key=lambda one: one["duration_ms"])
        self._addresses = {"tenant": tenant_id, "trace": longest["trace_id"]}
        self._app = AppTest.from_file(str(SCRIPT), default_timeout=TIMEOUT_S)
        self._app.session_state[session.CREDENTIAL] = admin_key
        self._run()

    @property
    def page(self) -> AppTest:
        """The page that was drawn last."""
        return self._app

    def _run(self) -> None:
        """Run a page.

        The test's runner leaves the page as the main module, which processes that are started later would run.
        """
        own = sys.modules["__main__"]
        try:
            self._app.run()
        finally:
            sys.modules["__main__"] = own

    def look(self, view: View) -> float:
        """Return the seconds until the page was drawn, without any cache.

        Raises RuntimeError for a page that fails or does not get its answers.
        """
        path, widgets, address = view
        app = self._app
        for name in ("names", "last tenant", "used by tenant", "read usage by end user"):
            if name in app.session_state:
                del app.session_state[name]
        for name, value in widgets.items():
            app.session_state[name] = self._addresses["tenant"] if value == TENANT else value
        app.query_params.clear()
        if address:
            app.query_params[address] = self._addresses[address]
        app._tree = ElementTree()  # of no page: the widgets of the one before have other options
        app._tree._runner = app
        app._page_hash = calc_hash(path)  # AppTest itself knows only pages that are files
        begin_s = time.perf_counter()
        self._run()
        seconds = time.perf_counter() - begin_s
        if app.exception or app.error:
            raise RuntimeError(f"{path}: {[one.value for one in [*app.exception, *app.error]]}")
        return seconds


def visit_until(gateway: str, admin_key: str, tenant_id: str, ended: Any, drawn: Any) -> None:
    """Open one page after another, as fast as a person may; `drawn` counts them.

    Pages are drawn at low priority, since a dashboard has its own processor: the measured cost is that of its reads at
    the gateway.
    """
    os.nice(19)
    visitor, views = Visitor(gateway, admin_key, tenant_id), list(all_views().values())
    random.shuffle(views)
    while not ended.is_set():
        for view in views:
            try:
                visitor.look(view)
            except RuntimeError as problem:  # who looks at a page goes on to the next
                print(f"a visitor met: {problem}", file=sys.stderr)
            drawn.value += 1
            if ended.wait(VISIT_EVERY_S):
                break


@contextmanager
def timing_reads() -> Iterator[dict[str, list[float]]]:
    """Record the seconds of each admin API read of this process's pages, by its path and grouping."""
    found: defaultdict[str, list[float]] = defaultdict(list)

    def begin(request: httpx.Request) -> None:
        request.extensions[_BEGUN] = time.perf_counter()

    def end(response: httpx.Response) -> None:
        response.read()
        found[name_of(response.request)].append(time.perf_counter() - response.request.extensions[_BEGUN])

    http = session.connections()
    http.event_hooks = {"request": [begin], "response": [end]}
    yield found
    http.event_hooks = {}


def name_of(request: httpx.Request) -> str:
    path: str = request.url.path.removeprefix(ADMIN)
    for start in _BY_ID:
        if path.startswith(start):
            path = f"{start}…"
    asked: Any = request.url.params
    shown = [f"{name}={asked[name]}" for name in ("group_by", "step") if name in asked]
    shown += [name for name in ("cursor", "tenant_id") if name in asked]
    return f"{path}?{'&'.join(shown)}" if shown else path
