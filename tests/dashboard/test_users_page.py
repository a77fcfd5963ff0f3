"""Users on the dashboard in a real browser: an owner invites a developer, who accepts, makes a key, and is disabled."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from tests.token_issuer import AUDIENCE, EC, TokenIssuer, started_issuer

from .test_pages import Browser, needs_browser, open_browser

__all__ = ["open_browser"]  # a fixture

NOT_OF_DEVELOPERS = (
    "Overview",
    "Tenants",
    "Users",
    "Spend",
    "Service classes",
    "Requests",
    "Quotas",
    "Prices",
    "Audit",
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def issuer() -> Iterator[TokenIssuer]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(started_issuer()) as issuer:
        yield issuer


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, issuer: TokenIssuer) -> Any:
    config = tmp_path_factory.mktemp("config") / "moiety.toml"
    config.write_text(f'[gateway]\noidc_issuer = "{issuer.url}"\noidc_audience = "{AUDIENCE}"\n')
    running = start_serve("--dashboard-port", "0", "--config", str(config))
    running.wait_for_line("moiety is ready at")
    return running


def token_of(who: str, issuer: TokenIssuer) -> str:
    """Return a token of a user, valid for an hour, without roles."""
    of_user = {"sub": who, "email": f"{who}@example.com", "exp": int(time.time()) + 3600, "moiety_roles": None}
    return issuer.token(EC, "ES256", "ec", **of_user)


@pytest.mark.slow
@needs_browser
def test_a_developer_accepts_an_invitation_makes_a_key_and_is_disabled(
    serve: Any, issuer: TokenIssuer, open_browser: Callable[[], Browser]
) -> None:
    with httpx.Client(base_url=f"{serve.url}/admin/v1", headers={"Authorization": f"Bearer {serve.admin_key}"}) as http:
        tenant = http.post("/tenants", json={"name": "people-inc"}).raise_for_status().json()
        for name in ("web", "search"):
            http.post("/projects", json={"tenant_id": tenant["id"], "name": name}).raise_for_status()
        owner = open_browser()
        owner.sign_in(serve.admin_key)
        owner.go("Users")
        page = owner.page
        page.get_by_role("combobox", name="Tenant of the policy").click()
        page.get_by_role("option", name="people-inc").click()
        form = page.get_by_test_id("stForm").filter(has_text="people-inc has no policy yet")  # not the one before it
        form.get_by_text("people-inc has no policy yet").wait_for()
        owner.look()  # until the fields of the form before it are gone
        form.get_by_text("Developers make keys").click()
        form.get_by_label("Longest lifetime, days").fill("30")
        form.get_by_role("button", name="Save policy").click()
        owner.see("Policy saved.")
        owner.see("Policy of people-inc: its developers make keys within these bounds.")
        (policy,) = http.get("/key-policies", params={"tenant_id": tenant["id"]}).json()["data"]
        assert (policy["makes_keys"], policy["max_days"]) == (True, 30)
        page.get_by_label("Email address").fill("ada@example.com")
        page.get_by_role("combobox", name="Tenant", exact=True).click()
        page.get_by_role("option", name="people-inc").click()
        page.get_by_role("button", name="Invite", exact=False).first.click()
        owner.see("Send this link to the user.")
        link = page.get_by_test_id("stCode").first.inner_text().strip()
        code = link.partition("invitation=")[2]
        assert re.fullmatch(r"inv_usr_[a-z0-9]{20}\.[0-9]+\.[A-Za-z0-9]+\.[0-9a-f]{64}", code), link
        owner.press("Done")
        owner.see_in_table("ada@example.com")

        developer = open_browser()
        open_link(developer, token_of("ada", issuer), code)
        developer.press("Accept the invitation")
        developer.page.get_by_role("heading", name="My keys", exact=True).wait_for()
        for name in NOT_OF_DEVELOPERS:
            navigation = developer.page.get_by_test_id("stSidebarNav")
            assert navigation.get_by_role("link", name=name, exact=True).count() == 0, name
        developer.see("You have no key yet.")
        developer.page.get_by_label("Key name").fill("laptop")
        developer.press("Make key")
        developer.see("Copy this key now.")
        key = developer.page.get_by_test_id("stCode").first.inner_text().strip()
        asked = {"model": "moiety-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        chat = f"{serve.url}/v1/chat/completions"
        sent = httpx.post(chat, json=asked, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert sent.status_code == 200, sent.text
        developer.press("Done")
        developer.see_in_table("laptop")
        developer.go("Catalogue")
        developer.see_in_table("moiety-demo")
        developer.go("My keys")
        developer.see_in_table("laptop")
        is_gone = "secret => !document.body.textContent.includes(secret)"
        developer.page.wait_for_function(is_gone, arg=key.partition(".")[2])

        (user,) = http.get("/users", params={"email": "ada@example.com"}).json()["data"]
        http.patch(f"/users/{user['id']}", json={"state": "disabled"}).raise_for_status()
        developer.see("The gateway no longer accepts this sign-in")  # in the open session
        refused = httpx.post(chat, json=asked, headers={"Authorization": f"Bearer {key}"}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "user_disabled")
    assert owner.complaints == []
    assert developer.complaints == []


@contextmanager
def invited(serve: Any, email: str) -> Iterator[tuple[Callable[[], str], str]]:
    """Invite a viewer; yield a function that returns its state, and the code of its invitation."""
    with httpx.Client(base_url=f"{serve.url}/admin/v1", headers={"Authorization": f"Bearer {serve.admin_key}"}) as http:
        user = http.post("/users", json={"email": email, "role": "viewer"}).raise_for_status().json()
        code = http.post(f"/users/{user['id']}/invitation").raise_for_status().json()["secret"]
        yield lambda: http.get(f"/users/{user['id']}").json()["state"], code


@pytest.mark.slow
@needs_browser
def test_an_invitation_stays_open_after_an_error_until_it_is_declined(
    serve: Any, issuer: TokenIssuer, open_browser: Callable[[], Browser]
) -> None:
    with invited(serve, "eve@example.com") as (state, code):
        browser = open_browser()
        open_link(browser, token_of("mallory", issuer), code)
        browser.press("Accept the invitation")
        browser.see("The invitation was not accepted")  # the token has another address
        browser.see("Accept it only if you expect it")
        browser.press("Decline")
        browser.see("The gateway rejected the sign-in")
        assert state() == "invited"


def open_link(browser: Browser, token: str, code: str) -> None:
    """Open the link of an invitation, and sign in."""
    browser.page.goto(f"{browser.address}/?invitation={code}")
    browser.page.get_by_label("Administrator key").fill(token)
    browser.press("Sign in")
    browser.see("Accept it only if you expect it")


@pytest.mark.slow
@needs_browser
def test_an_invitation_survives_the_way_to_the_identity_provider(
    serve: Any, issuer: TokenIssuer, open_browser: Callable[[], Browser]
) -> None:
    with invited(serve, "bob@example.com") as (state, code):
        browser = open_browser()
        browser.page.goto(f"{browser.address}/?invitation={code}")
        browser.see("You are invited.")
        browser.page.wait_for_function("document.cookie.includes('moiety_invitation')")
        browser.page.goto(browser.address)  # as the provider leads back: without the parameter
        browser.see("You are invited.")
        browser.page.get_by_label("Administrator key").fill(token_of("bob", issuer))
        browser.press("Sign in")
        browser.see("Accept it only if you expect it")
        assert state() == "invited"
        browser.press("Accept the invitation")
        browser.see("Signed in as")
        assert state() == "active"
        browser.page.wait_for_function("!document.cookie.includes('moiety_invitation')")
    assert browser.complaints == []
