"""The dashboard in a real browser beside a gateway that stops, at a reload, and in a narrow window."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.conftest import wait_for

from .test_pages import CHROMIUM, PAGES, ZONE, Browser, needs_browser

REFRESH_S = 3.0
HIDES = "one => { const s = one.querySelector('.dvn-scroller'); return s.scrollWidth > s.clientWidth + 1 }"
# texts of tiles, buttons and selections that their boxes cut off
CUT_OFF = """main => [...main.querySelectorAll(
    '[data-testid=stMetricValue] *, [data-testid=stMetricLabel] *, [data-testid=stButton] p, ' +
    '[data-testid=stSelectbox] *'
)].filter(one => one.textContent && one.scrollWidth > one.clientWidth + 1)
  .filter(one => getComputedStyle(one).overflowX !== 'visible')
  .map(one => one.textContent)"""
SAYS = "one => getComputedStyle(one, '::after').content.includes('columns are hidden, scroll sideways: ')"
AGREES = f"one => ({HIDES})(one) === ({SAYS})(one)"
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any]) -> Any:
    """Start a serve with its dashboard, which lets a stopped gateway be."""
    running = start_serve("--dashboard-port", "0", "--no-traces", "--hang-timeout-s", "0")
    running.wait_for_line("moiety is ready at")
    return running


@pytest.fixture
def signed_in(serve: Any) -> Iterator[Callable[[int], Browser]]:
    """`signed_in(width)`: a browser of this width in which the owner is signed in."""
    from playwright.sync_api import sync_playwright

    address = next(line.split()[1] for line in serve.output.splitlines() if line.startswith("  dashboard"))
    serve.wait_for_line("You can now view your Streamlit app")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_browser(width: int) -> Browser:
            page = chromium.new_page(viewport={"width": width, "height": 900}, timezone_id=ZONE.key)
            browser = Browser(page, address)
            browser.sign_in(serve.admin_key)
            return browser

        yield open_browser
        chromium.close()


def test_a_stopped_gateway_is_said_within_a_refresh_and_the_last_figures_stay(
    serve: Any, signed_in: Callable[[int], Browser]
) -> None:
    browser = signed_in(1440)
    main = browser.page.get_by_test_id("stMain")
    main.get_by_text("Goodput, 5 min").wait_for()
    badge = main.get_by_text("Stale: the gateway does not respond since").first
    gateway = serve.part("gateway")
    gateway.suspend()
    try:
        began = time.monotonic()
        badge.wait_for()
        assert time.monotonic() - began < 4 * REFRESH_S  # one refresh, a probe of 2 s, and a busy machine
        for _ in range(20):  # also through refreshes
            main.get_by_text("Goodput, 5 min").wait_for(timeout=4000)  # a refresh replaces it; the fault was 9 s
            time.sleep(0.25)
        browser.page.get_by_test_id("stSidebar").get_by_text("Gateway does not respond").wait_for()
        browser.page.reload()
        browser.page.get_by_text("This page opens as soon as it does.").wait_for()
    finally:
        gateway.resume()
    main.get_by_text("Goodput, 5 min").wait_for()  # without a click, and without signing in again
    badge.wait_for(state="detached")


def test_a_reload_stays_signed_in_by_a_cookie_that_scripts_cannot_read_until_sign_out(
    serve: Any, signed_in: Callable[[int], Browser]
) -> None:
    browser = signed_in(1440)
    page = browser.page
    (cookie,) = wait_for(
        lambda: [one for one in page.context.cookies() if one["name"] == "moiety_dashboard_session"], "the cookie"
    )
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert serve.admin_key not in cookie["value"]
    assert cookie["value"] not in page.evaluate("document.cookie")
    page.goto(f"{browser.address}/quotas")
    page.get_by_text("Signed in as").wait_for()
    page.get_by_role("heading", name="Quotas", exact=True).wait_for()
    browser.press("Sign out")
    page.get_by_label("Administrator key").wait_for()
    page.reload()
    page.get_by_label("Administrator key").wait_for()
    assert page.get_by_text("Signed in as").count() == 0


def test_every_page_fits_into_900_pixels_and_every_table_says_when_columns_are_hidden(
    signed_in: Callable[[int], Browser],
) -> None:
    browser = signed_in(900)
    page = browser.page
    num_hidden = 0
    for name in PAGES:
        browser.go(name)
        main = page.get_by_test_id("stMain")
        assert main.evaluate("one => one.scrollWidth - one.clientWidth") <= 0, name
        assert main.evaluate(CUT_OFF) == [], name
        tables = page.get_by_test_id("stDataFrame")
        for index in range(tables.count()):
            table = tables.nth(index)
            wait_for(partial(table.evaluate, AGREES), f"the note at table {index} of {name}")
            num_hidden += table.evaluate(HIDES)
    assert num_hidden > 0
    assert browser.complaints == []
