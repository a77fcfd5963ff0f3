"""A real browser on a dashboard whose gateway puts markup into every string: each page, part and dialog shows it as
text, asks for nothing, and offers nothing to click on."""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash
from tests.conftest import THOROUGH, free_port, wait_for
from tests.dashboard.hostile_gateway import REVERSES, TRACE_ID, HostileGateway, listening, serving

from moiety_dashboard import settings as dashboard_settings
from moiety_dashboard.client import path_of
from moiety_dashboard.views import PAGES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCRIPT = Path(dashboard_settings.__file__).parent / "app.py"
DEADLINE_S = 180
KEY = "mty_aaaaaaaaaaaaaaaa." + "b" * 32
JOINER = "\N{WORD JOINER}"

# What markup in a hostile string would have become: pictures and links by their addresses, the rest by its text.
FOUND = """port => {
  const found = [];
  for (const one of document.querySelectorAll('*')) {
    for (const name of ['src', 'href', 'srcset', 'data', 'action', 'poster', 'xlink:href', 'style', 'onerror'])
      if (/javascript:|evil\\.example|:PORT\\b/.test((one.getAttribute(name) || '').replaceAll(`:${port}`, ':PORT')))
        found.push(`${one.tagName} ${name}=${one.getAttribute(name)}`);
    if (['lxink', 'mxore', 'rxed', 'bxold', 'cxode', 'hxead', 'vpn_key'].includes(one.textContent.trim()))
      found.push(`${one.tagName} of ${one.textContent}`);
    if (one.classList.contains('katex')) found.push('a formula');
  }
  return found;
}"""

# Whether each table is drawn; its cells stand beside it as text.
DRAWN = "() => [...document.querySelectorAll('[data-testid=stDataFrame]')].every(one => one.querySelector('canvas td'))"

pytestmark = pytest.mark.timeout(900)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it where it may"
)


@pytest.fixture
def beacon() -> Iterator[tuple[int, list[str]]]:
    with listening() as found:
        yield found


@pytest.fixture
def gateway(beacon: tuple[int, list[str]]) -> HostileGateway:
    return HostileGateway(beacon[0])


def test_no_page_fails_over_hostile_strings(gateway: HostileGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(gateway) as url:
        monkeypatch.setattr("sys.argv", [str(SCRIPT), "--gateway", url])
        app = AppTest.from_file(str(SCRIPT), default_timeout=DEADLINE_S).run()
        app.text_input[0].input(KEY)
        app.button[0].click().run()
        for view in PAGES:
            app._page_hash = calc_hash(view.path)  # AppTest itself knows only pages that are files
            app.run()
            assert not app.exception, view.path
    assert gateway.unknown == []


def test_a_path_of_names_stays_one_path() -> None:
    assert path_of("keys", "../tenants?a=b#c/d", "revoke") == "/keys/..%2Ftenants%3Fa%3Db%23c%2Fd/revoke"


@dataclass
class Looks:
    """A browser, and the errors in what it showed."""

    page: Any
    address: str
    port: int
    wrong: list[str] = field(default_factory=list)
    num_shown: int = 0

    def __post_init__(self) -> None:
        self.page.set_default_timeout(DEADLINE_S * 1000)
        self.page.on("request", lambda sent: self._check_address(sent.url))

    def _check_address(self, url: str) -> None:
        if not url.startswith((self.address, self.address.replace("http", "ws"), "data:", "blob:")):
            self.wrong.append(f"asked {url}")

    def press(self, name: str, within: Any = None) -> None:
        (within or self.page).get_by_role("button", name=name, exact=True).first.click()

    def choose_part(self, name: str) -> None:
        self.page.get_by_role("radio", name=name, exact=True).click()

    def see(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()

    def look(self, where: str, *, shows: bool = True) -> None:
        """Check what the page shows now; with `shows`, that hostile text is among it as it is."""
        self.page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
        self.page.wait_for_function(DRAWN)
        self.wrong += [f"{where}: {one}" for one in self.page.evaluate(FOUND, self.port)]
        if self.page.get_by_test_id("stException").count():
            self.wrong.append(f"{where}: {self.page.get_by_test_id('stException').inner_text()}")
        text = str(self.page.locator("body").text_content())
        if REVERSES in text:
            self.wrong.append(f"{where}: text that is reversed")
        literal = f"=cmd()![p](http://127.0.0.1:{self.port}/"
        num = text.replace(JOINER, "").count(literal)
        if shows and not num:
            self.wrong.append(f"{where}: no hostile text is shown: {text[:2000]}")
        self.num_shown += num

    def hover_over_charts(self) -> None:
        """Show the tooltips of charts, which are HTML."""
        charts = self.page.get_by_test_id("stVegaLiteChart")
        for at in range(charts.count()):
            box = charts.nth(at).bounding_box()
            for part in (0.2, 0.5, 0.8, 0.95):
                self.page.mouse.move(box["x"] + box["width"] * part, box["y"] + box["height"] * 0.5)
        self.wrong += [f"tooltip: {one}" for one in self.page.evaluate(FOUND, self.port)]

    def open(self, name: str) -> None:
        self.page.get_by_test_id("stSidebarNav").get_by_role("link", name=name).click()

    def go(self, name: str) -> None:
        self.open(name)
        self.page.get_by_role("heading", name=name, exact=True).wait_for()

    def close_dialog(self, where: str, button: str | None = None) -> None:
        """Look at a dialog, confirm it or close it."""
        dialog = self.page.get_by_role("dialog")
        dialog.wait_for()
        self.look(where)
        if button is None:
            dialog.get_by_role("button", name="Close").click()
        else:
            self.press(button, dialog)
        dialog.wait_for(state="detached")

    def confirm(self, opener: str, where: str, button: str) -> None:
        """Press the button that opens a dialog, look at the dialog, and confirm it."""
        self.press(opener)
        self.close_dialog(where, button)


@pytest.fixture
def looks(gateway: HostileGateway, tmp_path: Path) -> Iterator[Looks]:
    from playwright.sync_api import sync_playwright

    port = free_port()
    log = tmp_path / "dashboard.log"
    with serving(gateway) as url, log.open("wb") as out:
        command = [sys.executable, "-m", "moiety_platform.cli", "dashboard", "--port", str(port), "--gateway", url]
        process = subprocess.Popen([*command, "--refresh-s", "60"], stdout=out, stderr=out, env={**os.environ})
        try:
            wait_for(lambda: "URL:" in log.read_text() or process.poll() is not None, "a dashboard", DEADLINE_S)
            assert process.poll() is None, log.read_text()
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                page = chromium.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
                yield Looks(page, f"http://127.0.0.1:{port}", gateway.port)
                chromium.close()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_S)


def sign_in(looks: Looks, path: str = "") -> None:
    looks.page.goto("about:blank")  # the page before writes its cookie some time after it is drawn
    looks.page.context.clear_cookies()  # of the session before
    looks.page.goto(f"{looks.address}/{path}")
    looks.page.get_by_label("Administrator key").fill(KEY)
    looks.press("Sign in")


def look_at_pages(looks: Looks) -> None:
    for view in PAGES:
        looks.go(view.title)
        looks.look(view.title, shows=view.title != "Playground")
        looks.hover_over_charts()


def look_at_a_tenant(looks: Looks) -> None:
    looks.go("Tenants")
    looks.page.get_by_role("combobox", name="Tenant").click()
    looks.page.get_by_role("option").first.click()
    looks.choose_part("Usage")
    looks.look("tenant, usage")
    looks.hover_over_charts()
    looks.choose_part("Keys")
    looks.see("Rotate or revoke")
    looks.look("tenant, keys")
    looks.confirm("Rotate", "rotate", "Rotate")
    looks.see("Copy this key now.")
    looks.look("a key that was made")
    looks.press("Done")
    looks.confirm("Revoke", "revoke", "Revoke")
    looks.see("revoked.")
    looks.look("the toast of a revoked key")
    looks.choose_part("Quotas")
    looks.see("Delete a quota")
    looks.look("tenant, quotas")
    looks.confirm("Delete quota", "delete a quota", "Delete")
    looks.choose_part("Settings")
    looks.confirm("Suspend", "suspend", "Suspend")
    looks.look("the toast of a suspended tenant")
    looks.press("New tenant")
    looks.close_dialog("new tenant")


def look_at_changes(looks: Looks, gateway: HostileGateway) -> None:
    looks.go("Service classes")
    looks.press("New class")
    looks.close_dialog("new class")
    looks.page.get_by_role("button", name="Delete =cmd").click()
    looks.close_dialog("delete a class", "Delete")
    looks.look("the toast of a deleted class")
    looks.go("Engines")
    looks.confirm("Drain", "drain", "Drain")
    looks.go("Quotas")
    looks.press("Reconcile now")
    looks.see("do not agree")
    looks.look("books")
    looks.go("Audit")
    looks.press("Verify the chain")
    looks.see("The audit log was tampered with")
    looks.look("verdict")
    looks.go("Webhooks")
    looks.press("Send a test")
    looks.see("Beginning of the response")
    looks.look("the report of a test delivery")
    looks.confirm("Delete webhook", "delete a webhook", "Delete")
    looks.go("Prices")
    looks.confirm("Delete price", "delete a price", "Delete")
    looks.go("Adapters")
    looks.confirm("Delete adapter", "delete an adapter", "Delete")
    looks.go("Contract check")
    looks.press("Check")
    looks.see("Accepted")
    looks.look("the result of a contract check")
    for gateway.simulation in ("running", "failed", "cancelled"):
        looks.go("Audit")
        looks.go("Simulator")
        looks.look(f"simulation that is {gateway.simulation}")


def look_at_answers(looks: Looks) -> None:
    looks.go("Playground")
    looks.page.get_by_role("textbox", name="API key").fill(KEY)
    looks.press("Send")
    looks.see("Decode speed")
    looks.see("· request")
    looks.look("an answer")


def download_a_table(looks: Looks) -> None:
    """Check that no cell of a table that is downloaded is a formula."""
    looks.go("Tenants")
    table = looks.page.get_by_test_id("stDataFrame").first
    table.wait_for()
    table.hover()
    assert looks.page.get_by_role("button", name="Download as CSV").count() == 0
    looks.page.get_by_role("button", name="more_horiz").first.press("Enter")  # visible only under the pointer
    with looks.page.expect_download() as download:
        looks.page.get_by_role("button", name="Download CSV").click()
    rows = list(csv.reader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    cells = [cell for row in rows for cell in row if "cmd()" in cell]
    assert cells
    assert all(cell.startswith("'=") for cell in cells), cells


@pytest.mark.slow
@needs_browser
def test_hostile_strings_are_text_on_every_page_in_every_dialog_and_in_downloads(
    looks: Looks, gateway: HostileGateway, beacon: tuple[int, list[str]]
) -> None:
    sign_in(looks)
    looks.see("Signed in as")
    look_at_pages(looks)
    download_a_table(looks)
    look_at_a_tenant(looks)
    look_at_changes(looks, gateway)
    sign_in(looks, f"traces?trace={TRACE_ID}")
    looks.see("Waterfall")
    looks.look("one trace")
    looks.hover_over_charts()
    look_at_answers(looks)
    gateway.refuses = True
    for view in PAGES if THOROUGH else PAGES[::4]:
        looks.open(view.title)
        looks.look(f"{view.title}, refused", shows=False)
    sign_in(looks)
    looks.see("rejected the key")
    looks.look("sign-in, refused")
    assert looks.wrong == []
    assert looks.num_shown > 100
    assert gateway.unknown == []
    assert beacon[1] == []
