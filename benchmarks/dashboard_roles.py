"""Screenshots of every page of the dashboard for each role, wide and narrow, light and dark, with much and no data.

    python benchmarks/dashboard_roles.py --out /tmp/pages [--roles owner,developer] [--widths 1440,900]
        [--themes light,dark] [--stores full,empty] [--pages overview,spend]

Starts `moiety serve` with the scripted engine and an OpenID Connect issuer on the loopback. The full store has an hour
of requests of six tenants, four weeks before it, and the objects of `dashboard_deployment.py`. A picture is named
`STORE/ROLE/PAGE-WIDTH-THEME.png`. Needs Chromium and the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashboard_deployment import (
    AUDIENCE,
    CONFIG,
    DEVELOPER,
    TokenIssuer,
    attributed,
    earlier_days,
    invite,
    issuing,
    set_up,
    store_spot_prices,
    use_all,
)
from dashboard_hour import Admin, change_something, make_tenants, past_requests, sending, served, store

if TYPE_CHECKING:
    from playwright.sync_api import ViewportSize

ROLES = ("owner", "tenant-admin", "developer", "viewer")
WIDTHS = (1440, 900)
THEMES = ("light", "dark")
STORES = ("full", "empty")
HEIGHT = 900
NUM_DAYS = 28
SETTLED = "[data-testid=stApp][data-test-script-state=notRunning]"
SIMULATED = {"simulator": "Simulate", "contract-check": "Check"}  # buttons of pages that run the simulator
PARTS = ("End users and tags", "Quotas", "Keys", "Settings")


@dataclass(frozen=True)
class Deployment:
    """A running deployment, with a credential for each role and an inference key."""

    dashboard: str
    credentials: Mapping[str, str]
    key: str


@contextmanager
def deployed(kind: str, live_s: float = 40.0) -> Iterator[Deployment]:
    """Start a deployment with much or no data."""
    with issuing() as issuer, tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "moiety.toml"
        config.write_text(CONFIG.format(issuer=issuer.url, audience=AUDIENCE))
        flags = ("--scripted", "--config", str(config))
        with served(*flags, engine=("--scripted-step-ms", "12")) as (url, dashboard, admin_key, data):
            admin = Admin(url, admin_key)
            if kind == "empty":
                yield empty(admin, issuer, dashboard, admin_key)
                return
            made = make_tenants(admin)
            set_up(admin, issuer, {one.profile.name: (one.tenant_id, one.project_id) for one in made})
            rng = random.Random(7)
            rows = attributed(past_requests(made, datetime.now(UTC), rng), rng)
            before = earlier_days(rows, NUM_DAYS, 0.15, rng)
            database_url = f"sqlite:///{data / 'moiety.db'}"
            for stored in (rows, before):
                asyncio.run(store(database_url, stored))
            asyncio.run(store_spot_prices(database_url, rng))
            change_something(admin, made)
            globex = made[1]
            use_all(url, globex.key)
            with sending(url, made, {}):
                time.sleep(live_s)
                credentials = credentials_of(admin, issuer, admin_key, globex.tenant_id)
                yield Deployment(dashboard, credentials, globex.key)


def empty(admin: Admin, issuer: TokenIssuer, dashboard: str, admin_key: str) -> Deployment:
    """Add the users, and a key that sends nothing, to a deployment without data."""
    tenant_id = admin("GET", "/tenants")["data"][0]["id"]
    invite(admin, issuer, DEVELOPER, "developer", tenant_id)
    return Deployment(dashboard, credentials_of(admin, issuer, admin_key, tenant_id), "")


def credentials_of(admin: Admin, issuer: TokenIssuer, admin_key: str, tenant_id: str) -> dict[str, str]:
    boss = admin("POST", "/keys", {"name": "boss", "role": "tenant-admin", "tenant_id": tenant_id})
    viewer = admin("POST", "/keys", {"name": "auditor", "role": "viewer"})
    return {
        "owner": admin_key,
        "tenant-admin": boss["secret"],
        "developer": issuer.token_of(DEVELOPER),
        "viewer": viewer["secret"],
    }


class Photographer:
    """A signed-in browser window of one width and theme."""

    def __init__(self, page: Any, width: int, name_of: Callable[[str], Path]) -> None:
        self._page = page
        self._width = width
        self._name_of = name_of
        self._links = page.get_by_test_id("stSidebarNav").get_by_role("link")

    def sign_in(self, address: str, credential: str) -> None:
        self._page.goto(address)
        self._page.get_by_label("Administrator key").fill(credential)
        self._page.get_by_role("button", name="Sign in", exact=True).click()
        self._page.get_by_text("Signed in as").wait_for(state="attached")

    def paths(self) -> list[str]:
        """Return the paths of the pages in the navigation; the first one has the address of the dashboard itself."""
        self._links.first.wait_for(state="attached")
        addresses = [one.get_attribute("href") for one in self._links.all()]
        return ["first", *(address.rpartition("/")[2] for address in addresses[1:])]

    def settle(self) -> None:
        """Wait until the page is drawn and its animations have ended."""
        self._page.locator(SETTLED).wait_for()
        self._page.wait_for_timeout(1800)
        self._page.locator(SETTLED).wait_for()

    def shoot(self, name: str) -> None:
        """Take a picture of the whole page, whatever its length."""
        self.settle()
        height = int(self._page.get_by_test_id("stMain").evaluate("node => node.scrollHeight"))
        self._page.set_viewport_size({"width": self._width, "height": max(HEIGHT, height)})
        self._page.wait_for_timeout(700)
        self._page.screenshot(path=self._name_of(name))
        self._page.set_viewport_size({"width": self._width, "height": HEIGHT})

    def visit(self, number: int, path: str, key: str) -> None:
        """Take the pictures of one page, with its parts and what a click or a request adds to it."""
        page = self._page
        self._links.nth(number).evaluate("node => node.click()")  # in a narrow window the navigation covers the page
        page.wait_for_timeout(400)
        self.shoot(path)
        if path == "tenants":
            self._visit_parts()
        elif path in ("requests", "traces"):
            rows = page.locator(".dvn-scroller").first
            if rows.count():
                rows.click(position={"x": 250, "y": 55})
                self.shoot(f"{path}-one")
        elif path == "playground" and key:
            page.get_by_role("textbox", name="API key").fill(key)
            page.get_by_role("button", name="Send").click()
            page.get_by_text("Decode speed").wait_for()
            page.wait_for_timeout(6500)
            self.shoot(f"{path}-answer")
        elif path in SIMULATED and (start := page.get_by_role("button", name=SIMULATED[path], exact=True)).count():
            if path == "contract-check":  # a part that is soon simulated
                page.get_by_role("combobox", name="Simulated part").click()
                page.get_by_role("option", name="busiest 10 min").click()
                page.get_by_role("combobox", name="Step time model").click()
                page.get_by_role("option", name="h200").first.click()
            start.click()
            page.get_by_role("button", name="Cancel", exact=True).wait_for()
            page.get_by_role("button", name="Cancel", exact=True).wait_for(state="detached", timeout=300_000)
            self.shoot(f"{path}-result")
        elif path == "audit" and (verify := page.get_by_role("button", name="Verify the chain")).count():
            verify.click()
            self.shoot(f"{path}-verified")

    def _visit_parts(self) -> None:
        page = self._page
        chooser = page.get_by_role("combobox", name="Tenant", exact=True)
        if chooser.count():
            chooser.click()
            options = page.get_by_role("option")
            options.first.wait_for()
            globex = options.filter(has_text="globex")
            (globex if globex.count() else options).first.click()
            self.shoot("tenants-chosen")
        for part in PARTS:
            page.get_by_role("radio", name=part, exact=True).click()
            self.shoot(f"tenants-{part.lower().replace(' ', '-')}")


def photograph(deployment: Deployment, kind: str, options: argparse.Namespace) -> None:
    """Take the pictures of every page for the roles, widths and themes of the options."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for role in options.roles:
            folder = options.out / kind / role
            folder.mkdir(parents=True, exist_ok=True)
            for width in options.widths:
                for theme in options.themes:
                    size: ViewportSize = {"width": width, "height": HEIGHT}
                    page = browser.new_page(viewport=size, color_scheme=theme)
                    page.set_default_timeout(60_000)
                    camera = Photographer(page, width, partial(_file_of, folder, width, theme))
                    camera.sign_in(deployment.dashboard, deployment.credentials[role])
                    for number, path in enumerate(camera.paths()):
                        if not options.pages or path in options.pages:
                            camera.visit(number, path, deployment.key)
                    page.close()
        browser.close()


def _file_of(folder: Path, width: int, theme: str, name: str) -> Path:
    return folder / f"{name}-{width}-{theme}.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--roles", type=words, default=list(ROLES))
    parser.add_argument("--widths", type=lambda text: [int(one) for one in text.split(",")], default=list(WIDTHS))
    parser.add_argument("--themes", type=words, default=list(THEMES))
    parser.add_argument("--stores", type=words, default=list(STORES))
    parser.add_argument("--pages", type=words, default=[], help="paths of pages [all]")
    options = parser.parse_args()
    for kind in options.stores:
        with deployed(kind) as deployment:
            photograph(deployment, kind, options)
    print(f"pictures are in {options.out}")


if __name__ == "__main__":
    main()
