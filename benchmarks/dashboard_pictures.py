"""Screenshots of the dashboard's pages, light and dark, at the size of a laptop screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

VIEWPORT: ViewportSize = {"width": 1440, "height": 900}
PAGES = (
    *("Overview", "Tenants", "Catalogue", "Spend", "Service classes", "Engines", "Requests", "Traces", "Quotas"),
    "Audit",
)
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def take_pictures(dashboard: str, admin_key: str, out: Path) -> None:
    """Take a screenshot of every page that needs no model, light and dark, at the size of a laptop screen."""
    from playwright.sync_api import Page, sync_playwright

    def settle(page: Page) -> None:
        """Wait until the page is drawn and its animations have ended."""
        page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
        page.wait_for_timeout(2500)
        page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for theme in THEMES:
            page = browser.new_page(viewport=VIEWPORT, color_scheme=theme)
            page.goto(dashboard)
            page.get_by_label("Administrator key").fill(admin_key)
            page.screenshot(path=out / f"sign-in-{theme}.png")
            page.get_by_role("button", name="Sign in").click()
            page.get_by_text("Goodput, 5 min").wait_for()
            for name in PAGES:
                page.get_by_test_id("stSidebarNav").get_by_role("link", name=name, exact=True).click()
                page.get_by_role("heading", name=name, exact=True).wait_for()
                settle(page)
                if name == "Audit":
                    page.get_by_role("button", name="Verify the chain").click()
                    settle(page)
                if name == "Tenants":
                    page.get_by_role("combobox", name="Tenant").click()
                    page.get_by_role("option", name="globex").click()
                    settle(page)
                    shoot(page, out / f"tenants-{theme}.png")
                    for part in ("Quotas", "Keys", "Settings"):
                        page.get_by_role("radio", name=part, exact=True).click()
                        settle(page)
                        shoot(page, out / f"tenant-{part.lower()}-{theme}.png")
                    continue
                shoot(page, out / f"{name.lower().replace(' ', '-')}-{theme}.png")
                if name == "Traces":
                    page.get_by_label("Min duration, ms").fill("900")  # one that was long in the batch
                    page.get_by_label("Min duration, ms").press("Enter")
                    settle(page)
                    page.locator(".dvn-scroller").first.click(position={"x": 320, "y": 55})
                    page.get_by_text("Waterfall").wait_for()
                    settle(page)
                    shoot(page, out / f"trace-{theme}.png")
            simulate(page)
            shoot(page, out / f"simulator-{theme}.png")
            check_contract(page)
            shoot(page, out / f"contract-check-{theme}.png")
            page.close()
        browser.close()


def simulate(page: Any) -> None:
    """Simulate three times the last minutes' traffic on one replica; the second theme shows the first's result."""
    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Simulator").click()
    page.get_by_role("heading", name="Simulator", exact=True).wait_for()
    page.wait_for_timeout(2500)
    if page.get_by_text("Wasted prefill").count() == 0:
        page.get_by_role("combobox", name="Traffic").click()
        page.get_by_role("option", name="recorded requests, last 15 min").click()
        page.get_by_role("combobox", name="Step time model").click()
        page.get_by_role("option", name="a100-llama3-8b", exact=True).click()
        page.get_by_role("spinbutton", name="Load factor").fill("3")
        page.get_by_role("button", name="Simulate", exact=True).click()
    page.get_by_text("Wasted prefill").first.wait_for(timeout=300_000)
    page.wait_for_timeout(2500)


def check_contract(page: Any) -> None:
    """Check a contract beside the last minutes' traffic; the check is repeated in each theme."""
    page.get_by_test_id("stSidebarNav").get_by_role("link", name="Contract check").click()
    page.get_by_role("heading", name="Contract check", exact=True).wait_for()
    page.get_by_role("combobox", name="Simulated part").click()
    page.get_by_role("option", name="busiest 10 min").click()
    page.get_by_role("combobox", name="Step time model").click()
    page.get_by_role("option", name="a100-llama3-8b", exact=True).click()
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_text("Replicas needed").wait_for(timeout=300_000)
    page.wait_for_timeout(2500)


def take_pictures_of_model(dashboard: str, admin_key: str, key: str, out: Path) -> None:
    """Take screenshots of the pages that need a model: its experts, and its answer in the playground."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for theme in THEMES:
            page = browser.new_page(viewport=VIEWPORT, color_scheme=theme)
            page.goto(f"{dashboard}/experts")
            page.get_by_label("Administrator key").fill(admin_key)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_test_id("stVegaLiteChart").nth(2).wait_for()
            page.wait_for_timeout(2500)
            shoot(page, out / f"experts-{theme}.png")
            page.get_by_test_id("stSidebarNav").get_by_role("link", name="Playground").click()
            page.get_by_role("textbox", name="API key").fill(key)
            page.get_by_role("button", name="Send").click()
            page.get_by_text("Decode speed").wait_for()
            page.get_by_text("Open trace").or_(page.get_by_text("The trace was not sampled")).first.wait_for()
            shoot(page, out / f"playground-{theme}.png")
            page.close()
        browser.close()


def shoot(page: Any, path: Path) -> None:
    """Take a screenshot of the whole page, whatever its length."""
    main = page.get_by_test_id("stMain")
    height = main.evaluate("node => node.scrollHeight")
    page.set_viewport_size({**VIEWPORT, "height": max(VIEWPORT["height"], int(height))})
    page.wait_for_timeout(900)
    page.screenshot(path=path)
    page.set_viewport_size(VIEWPORT)
