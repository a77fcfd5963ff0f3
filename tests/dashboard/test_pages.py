"""The dashboard against a real gateway: signing in, and in a real browser every page, with nothing in the store and
with something."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Block
from streamlit.util import calc_hash
from tests.conftest import free_port, wait_for

from moiety_dashboard import settings as dashboard_settings
from moiety_dashboard.client import AdminClient
from moiety_dashboard.views import PAGES as VIEWS

SCRIPT = Path(dashboard_settings.__file__).parent / "app.py"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ZONE = ZoneInfo("America/St_Johns")  # the browser's time zone, in which no server runs
MARK = "zebracrossing"  # of a prompt, which no page shows but the one where it is written
DEADLINE_S = 180  # a browser, five processes and a simulation share the processor time with other tests
PAGES = (
    "Overview",
    "Tenants",
    "Users",
    "Catalogue",
    "Spend",
    "Service classes",
    "Engines",
    "Experts",
    "Requests",
    "Traces",
    "Agent runs",
    "Quotas",
    "Prices",
    "Routes",
    "Guardrails",
    "Adapters",
    "Batches",
    "Alerts",
    "Webhooks",
    "Playground",
    "Simulator",
    "Contract check",
    "Audit",
)
FOR_OPERATORS = {"Engines", "Simulator", "Contract check", "Webhooks", "Guardrails"}

pytestmark = pytest.mark.timeout(900)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it where it may"
)


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A serve with its dashboard, that nobody has used; its simulations are waited for, and give way to nobody."""
    config = tmp_path_factory.mktemp("config") / "moiety.toml"
    config.write_text("[gateway]\nsimulation_niceness = 0\n")
    running = start_serve("--dashboard-port", "0", "--config", str(config))
    running.wait_for_line("moiety is ready at")
    return running


def open_app(monkeypatch: pytest.MonkeyPatch, url: str) -> AppTest:
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--gateway", url])
    return AppTest.from_file(str(SCRIPT), default_timeout=DEADLINE_S).run()


def sign_in(app: AppTest, key: str) -> AppTest:
    app.text_input[0].input(key)
    return app.button[0].click().run()


def test_opening_the_dashboard_requires_an_administrators_key(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOIETY_ADMIN_KEY", serve.admin_key)  # unused, since it is not the visitor's
    app = open_app(monkeypatch, serve.url)
    assert not app.metric
    app = sign_in(app, serve.tenant_key)  # good, but no administrator's
    assert "rejected the key" in app.error[0].value
    app = sign_in(app, serve.admin_key)
    assert not app.error
    assert not app.exception
    assert "Goodput, 5 min" in {metric.label for metric in app.metric}
    assert "owner" in app.sidebar.caption[0].value


def test_the_query_behind_a_panel_answers_in_a_shell_what_the_panel_shows(serve: Any) -> None:
    since = (datetime.now(UTC) - timedelta(hours=1)).isoformat()  # with a character that a form decodes as a space
    with httpx.Client() as http:
        client = AdminClient(serve.url, serve.admin_key, http)
        answers = [client.get("/usage/minutes", group_by="service_class", since=since), client.get("/classes")]
    for answer in answers:
        keyed = {**os.environ, "MOIETY_ADMIN_KEY": serve.admin_key}
        done = subprocess.run(answer.query, shell=True, check=True, capture_output=True, env=keyed, timeout=DEADLINE_S)
        told = json.loads(done.stdout)
        assert told.get("data") == answer.data["data"], told


def test_behind_every_panel_and_row_of_figures_of_every_page_stands_a_query(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = sign_in(open_app(monkeypatch, serve.url), serve.admin_key)
    num_queries = {}
    for view in VIEWS:
        app._page_hash = calc_hash(view.path)  # AppTest itself knows only pages that are files
        app.run()
        assert not app.exception, view.path
        popovers = [node for node in app.main if isinstance(node, Block) and node.type == "popover"]
        queries = [[code.value for code in popover.get("code")] for popover in popovers]
        assert all(queries), (view.path, queries)
        assert all(query.startswith("curl ") for listed in queries for query in listed)
        num_queries[view.path] = len(queries)
    assert min(num_queries[path] for path in ("overview", "tenants", "classes", "engines", "quotas", "audit")) > 0
    assert num_queries["engines"] == 7


def test_a_contract_is_checked_on_its_page(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = sign_in(open_app(monkeypatch, serve.url), serve.admin_key)
    app._page_hash = calc_hash("contract-check")
    app.run()
    for field in app.number_input:
        if field.label in ("Input tokens", "Output tokens"):
            field.set_value(20)
    next(button for button in app.button if button.label == "Check").click()
    app.run()
    assert not app.exception and not app.error
    assert [found.value.startswith("**Accepted**: 1 replica carries the tenant") for found in app.success] == [True]
    assert "New tenant's attainment" in {metric.label for metric in app.metric}
    assert "Cancel" not in {button.label for button in app.button}


def test_a_gateway_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    app = sign_in(open_app(monkeypatch, f"http://127.0.0.1:{free_port()}"), "mty_aaaaaaaaaaaaaaaa." + "b" * 32)
    assert "does not respond" in app.error[0].value
    assert not app.exception


class Browser:
    """A real browser on the dashboard. It keeps what goes wrong on any page."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.complaints: list[str] = []
        page.set_default_timeout(DEADLINE_S * 1000)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("request", lambda sent: None if self._is_own(sent.url) else self._note(f"asked {sent.url}"))

    def _hear(self, message: Any) -> None:
        """Record errors, except those of Streamlit's search for its server below a linked page's address."""
        if message.type == "error" and not re.search(r"/\w+/_stcore/", message.location["url"]):
            self._note(f"{message.text} {message.location['url']}")

    def _note(self, complaint: str) -> None:
        self.complaints.append(complaint)

    def _is_own(self, url: str) -> bool:
        return url.startswith((self.address, self.address.replace("http", "ws"), "data:", "blob:"))

    def sign_in(self, key: str, path: str = "") -> None:
        self.page.goto("about:blank")  # the page before writes its cookie some time after it is drawn
        self.page.context.clear_cookies()  # of the session of another key
        self.page.goto(f"{self.address}/{path}")
        self.page.get_by_label("Administrator key").fill(key)
        self.press("Sign in")
        self.page.get_by_text("Signed in as").wait_for()

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).click()

    def go(self, name: str) -> str:
        """Open a page; return everything that it shows."""
        self.page.get_by_test_id("stSidebarNav").get_by_role("link", name=name).click()
        self.page.get_by_role("heading", name=name, exact=True).wait_for()
        return self.look()

    def look(self) -> str:
        """Return everything that the page shows, also tables, which are drawn with their text beside them."""
        self.page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
        main = self.page.get_by_test_id("stMain")
        for table in range(main.get_by_test_id("stDataFrame").count()):
            cells = main.get_by_test_id("stDataFrame").nth(table).locator("canvas td")
            cells.first.wait_for(state="attached")
        assert main.get_by_test_id("stException").count() == 0, main.inner_text()
        return str(main.text_content())

    def see(self, text: str | re.Pattern[str]) -> None:
        self.page.get_by_text(text).first.wait_for()

    def see_in_table(self, text: str) -> None:
        self.page.locator("canvas td", has_text=text).first.wait_for(state="attached")  # beside what is drawn


@pytest.fixture
def open_browser(serve: Any) -> Iterator[Callable[[], Browser]]:
    from playwright.sync_api import sync_playwright

    address = next(line.split()[1] for line in serve.output.splitlines() if line.startswith("  dashboard"))
    serve.wait_for_line("You can now view your Streamlit app")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        size = {"width": 1440, "height": 900}
        yield lambda: Browser(chromium.new_page(viewport=size, timezone_id=ZONE.key), address)
        chromium.close()


def look_at_the_trace_of_globex(browser: Browser) -> None:
    """Open a trace by its address, search for it in the list and open it by a click; then search for one that does not
    exist."""
    page = browser.page
    address, shown = page.url, browser.look()
    assert MARK not in shown
    for text in ("Tenant globex", "SLO", "kept: first", "Waterfall", "Events", "Batch"):
        assert text in shown, text
    for text in ("quota.settle", "engine.decode", "admitted"):
        browser.see_in_table(text)
    browser.press("All traces")
    page.get_by_role("combobox", name="Reason").fill("no such reason")
    page.get_by_role("combobox", name="Reason").press("Enter")
    browser.see("No stored trace matches.")
    page.get_by_role("combobox", name="Reason").fill("first")
    page.get_by_role("combobox", name="Reason").press("Enter")
    browser.see_in_table("globex")
    page.locator(".dvn-scroller").first.click(position={"x": 320, "y": 55})
    page.get_by_role("heading", name="chat moiety-demo").wait_for()
    assert page.url == address
    browser.press("All traces")
    browser.see_in_table("first")  # the search is still the same


def drain_and_wake_the_engine(browser: Browser) -> None:
    browser.go("Engines")
    browser.press("Drain")
    browser.see("Are you sure?")
    browser.page.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()
    browser.see_in_table("asleep")
    browser.press("Wake")
    browser.page.get_by_role("dialog").get_by_role("button", name="Wake").click()
    browser.see_in_table("ready")


def verify_the_audit_log(browser: Browser, serve: Any) -> None:
    """Look at the new limit in the audit log, verify the chain, and check that times are those of the browser."""
    browser.go("Audit")
    browser.see_in_table("tenant globex tokens_per_day 5")
    browser.press("Verify the chain")
    browser.see(re.compile("All .* entries are intact"))
    with httpx.Client(headers={"Authorization": f"Bearer {serve.admin_key}"}) as http:
        newest = http.get(f"{serve.url}/admin/v1/audit", params={"limit": 1}).json()["data"][0]["at"]
    browser.see_in_table(f"{datetime.fromisoformat(newest).astimezone(ZONE):%Y-%m-%d %H:%M:%S}")
    browser.see(re.compile(rf"as of .* {datetime.now(ZONE):%Z}"))


@pytest.mark.slow
@needs_browser
def test_an_owner_makes_a_tenant_sends_requests_limits_it_and_finds_all_of_it_again(
    serve: Any, open_browser: Callable[[], Browser]
) -> None:
    browser = open_browser()
    page = browser.page
    browser.sign_in(serve.admin_key)
    for name in PAGES:
        browser.go(name)  # with nothing in the store

    browser.go("Tenants")
    browser.press("New tenant")
    page.get_by_label("Name").fill("globex")
    browser.press("Create tenant")
    page.get_by_role("heading", name="globex").wait_for()
    page.get_by_role("radio", name="Keys").click()
    page.get_by_label("Key name").fill("website")
    browser.press("Create key")
    browser.see("Copy this key now.")
    browser.see_in_table("website")
    keys, key, form = (page.get_by_text(text).last for text in ("identified by", "Copy this key now.", "New key"))
    tops = [one.evaluate("one => one.getBoundingClientRect().top") for one in (keys, key, form)]
    assert tops == sorted(tops), "a new key is beside the form, not above the list of keys"
    browser.press("Try it in the playground")
    browser.see("The key is set in the playground.")
    page.get_by_role("heading", name="Playground", exact=True).wait_for()
    page.get_by_label("Prompt", exact=True).fill(f"what is a {MARK}?")
    browser.press("Send")
    browser.see("Decode speed")
    browser.see(re.compile("Cost"))
    page.get_by_text("Open trace").click()
    page.get_by_role("heading", name="chat moiety-demo").wait_for()
    waterfall = page.get_by_test_id("stVegaLiteChart").first
    waterfall.wait_for()
    assert "trace=" in page.url
    look_at_the_trace_of_globex(browser)
    browser.go("Playground")
    page.get_by_label("Prompt", exact=True).fill("And then?")
    browser.press("Send")
    browser.see("And then?")
    page.get_by_test_id("stMetricLabel").get_by_text("Decode speed").nth(1).wait_for()
    browser.go("Overview")
    browser.see("2 in 1 h")
    boxes = [tile.bounding_box() for tile in page.get_by_test_id("stMetric").all()]
    assert len({round(box["width"]) for box in boxes if box}) == 1, boxes  # also of those in a second row

    browser.go("Simulator")
    page.get_by_role("spinbutton", name="Load factor").fill("2")
    browser.press("Simulate")
    browser.see("Wasted prefill")
    browser.see_in_table("Longest queue time")
    page.get_by_role("link", name="Apply on Service classes").click()
    page.get_by_role("heading", name="Service classes", exact=True).wait_for()

    browser.go("Experts")
    browser.see("without experts")  # the scripted engine computes nothing; tests/system looks at a model that has some

    browser.go("Tenants")
    page.get_by_role("radio", name="Quotas").click()
    page.get_by_label("Cap", exact=True).fill("5")
    page.get_by_label("Cap", exact=True).press("Tab")
    browser.see("New quota: 5 tokens per day")
    browser.press("Set quota")
    browser.see_in_table("tenant globex")
    browser.go("Playground")
    page.get_by_label("Prompt", exact=True).fill("Once more?")
    browser.press("Send")
    browser.see(re.compile("429 request_exceeds_quota: .*"))

    verify_the_audit_log(browser, serve)
    for name in PAGES:
        shown = browser.go(name)  # with something in it
        assert serve.admin_key.partition(".")[2] not in shown, name
        assert name == "Playground" or MARK not in shown, name
    drain_and_wake_the_engine(browser)

    browser.go("Overview")
    gateway = serve.part("gateway")
    gateway.send_signal(signal.SIGSTOP)  # the page must say so, and recover
    try:
        browser.see(re.compile("does not respond"))
    finally:
        gateway.send_signal(signal.SIGCONT)
    browser.see("serving moiety-demo")
    assert browser.complaints == []
    stored = {file.name: file.read_bytes() for file in serve.data_dir.rglob("*") if file.is_file()}
    told = {"log": serve.output.encode(), "metrics": httpx.get(f"{serve.url}/metrics").content} | stored
    assert len(stored) > 2
    assert [name for name, text in told.items() if MARK.encode() in text] == []


def a_kept_trace(http: httpx.Client, serve: Any) -> str:
    """Return a trace of a request of the tenant that a serve creates at its start."""
    headers = {"Authorization": f"Bearer {serve.tenant_key}"}
    httpx.post(f"{serve.url}/v1/completions", headers=headers, json={"model": "none", "prompt": "hello"}, timeout=60)
    asked = {"reason": "model_not_found"}
    return str(
        wait_for(lambda: http.get("/traces", params=asked).json()["data"], "a trace that is kept")[0]["trace_id"]
    )


@pytest.mark.slow
@needs_browser
@pytest.mark.every_value
def test_a_tenants_administrator_sees_nothing_of_another_on_any_page_or_by_any_address(
    serve: Any, open_browser: Callable[[], Browser]
) -> None:
    headers = {"Authorization": f"Bearer {serve.admin_key}"}
    with httpx.Client(base_url=f"{serve.url}/admin/v1", headers=headers) as http:
        own, other = (http.post("/tenants", json={"name": name}).json() for name in ("initech", "hidden-corp"))
        for tenant in (own, other):
            project = {"tenant_id": tenant["id"], "name": f"project of {tenant['name']}"}
            made = http.post("/projects", json=project).json()
            http.post("/keys", json={"name": f"key of {tenant['name']}", "project_id": made["id"]})
            limit = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": 777}
            http.put("/quotas", json=limit)
        boss = {"name": "boss", "role": "tenant-admin", "tenant_id": own["id"]}
        key = http.post("/keys", json=boss).json()["secret"]
        trace_id = a_kept_trace(http, serve)
    browser = open_browser()
    for not_its_own in (trace_id, "../tenants"):
        browser.sign_in(key, f"traces?trace={not_its_own}")
        browser.see("No trace with this id is stored.")
    browser.sign_in(key, f"tenants?tenant={other['id']}")
    browser.see("initech")
    shown = {name: browser.go(name) for name in PAGES if name not in FOR_OPERATORS}
    parts = {
        "Usage": "Prompt tokens, 1 h",
        "Quotas": "Set a quota",
        "Keys": "New key",
        "Settings": "Only owners and operators",
    }
    tables = {"Quotas": "tokens per day", "Keys": "project of initech"}
    for part, sign in parts.items():
        browser.go("Tenants")
        browser.page.get_by_role("radio", name=part, exact=True).click()
        browser.see(sign)
        if part in tables:
            browser.see_in_table(tables[part])
        shown[part] = browser.look()
    assert "initech" in shown["Tenants"]
    for name, text in shown.items():
        assert "hidden-corp" not in text, name
        assert other["id"] not in text, name
    for name in FOR_OPERATORS:
        assert browser.page.get_by_role("link", name=name).count() == 0
    assert browser.complaints == []


@pytest.mark.slow
@needs_browser
def test_a_tenants_usage_is_shown_by_its_end_users_and_by_its_tags(
    serve: Any, open_browser: Callable[[], Browser]
) -> None:
    with httpx.Client(base_url=f"{serve.url}/admin/v1", headers={"Authorization": f"Bearer {serve.admin_key}"}) as http:
        tenant = http.post("/tenants", json={"name": "umbrella"}).json()
        project = http.post("/projects", json={"tenant_id": tenant["id"], "name": "web"}).json()
        key = http.post("/keys", json={"project_id": project["id"], "name": "site"}).json()["secret"]
    asked = {"model": "moiety-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    for user, team, count in (("alice", "search", 3), ("**bob**", "ads", 2), (None, None, 1)):
        headers = {"Authorization": f"Bearer {key}", **({"x-moiety-tags": f"team={team}"} if team else {})}
        for _ in range(count):
            body = asked | ({"user": user} if user else {})
            httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=60).raise_for_status()
    browser = open_browser()
    page = browser.page
    browser.sign_in(serve.admin_key, f"tenants?tenant={tenant['id']}")
    page.get_by_role("radio", name="End users and tags").click()
    browser.see("Usage by end user")
    for text in ("alice", "**bob**"):
        browser.see_in_table(text)
    page.get_by_test_id("stVegaLiteChart").nth(1).wait_for()
    page.get_by_role("combobox", name="Group by").click()
    page.get_by_role("option", name="tag team").click()
    browser.see("Usage by tag team")
    for text in ("search", "ads"):
        browser.see_in_table(text)
    page.get_by_role("radio", name="24 h").last.click()
    browser.see("the 5 with most tokens, by hour")
    browser.look()
    assert browser.complaints == []
