"""The dashboard's page against a real gateway: what it shows, and what it says when it cannot."""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest

from moiety_dashboard import settings as dashboard_settings

SCRIPT = Path(dashboard_settings.__file__).parent / "app.py"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE_S = 60


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any]) -> Any:
    """A serve with its dashboard, that has answered three requests."""
    running = start_serve("--dashboard-port", "0")
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}]}
    for _ in range(3):
        headers = {"Authorization": f"Bearer {running.tenant_key}"} if running.url else {}
        assert httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers).status_code == 200
    return running


def open_page(monkeypatch: pytest.MonkeyPatch, url: str, admin_key: str | None) -> AppTest:
    monkeypatch.setenv("MOIETY_URL", url)
    monkeypatch.setattr("sys.argv", [str(SCRIPT)])
    if admin_key is None:
        monkeypatch.delenv("MOIETY_ADMIN_KEY", raising=False)
    else:
        monkeypatch.setenv("MOIETY_ADMIN_KEY", admin_key)
    return AppTest.from_file(str(SCRIPT), default_timeout=DEADLINE_S).run()


def test_the_page_shows_requests_engine_tenant_and_keys(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = open_page(monkeypatch, serve.url, serve.admin_key)
    assert not page.exception
    assert {metric.label: metric.value for metric in page.metric}["Active keys"] == "2"
    assert [heading.value for heading in page.subheader] == ["Engines", "Tenants", "Keys"]
    engines, tenants, keys = (table.value for table in page.dataframe)
    assert list(engines["state"]) == ["ready"]
    assert list(tenants["tenant"]) == ["demo"]
    assert len(keys) == 2


def test_a_tenants_administrator_sees_its_tenant_and_no_engines(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with httpx.Client(base_url=f"{serve.url}/admin/v1", headers={"Authorization": f"Bearer {serve.admin_key}"}) as http:
        tenant = http.post("/tenants", json={"name": "acme"}).json()
        new = {"name": "boss", "role": "tenant-admin", "tenant_id": tenant["id"]}
        made = http.post("/keys", json=new).json()
        page = open_page(monkeypatch, serve.url, made["secret"])
        assert not page.exception
        assert not page.error
        assert [heading.value for heading in page.subheader] == ["Tenants", "Keys"]
        tenants, keys = (table.value for table in page.dataframe)
        assert (list(tenants["tenant"]), list(keys["owner"])) == (["acme"], ["tenant-admin of acme"])
        http.post(f"/keys/{made['key']['id']}/revoke")


def test_without_a_key_the_page_asks_for_one_and_takes_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = open_page(monkeypatch, serve.url, None)
    assert not page.metric
    page.text_input[0].input(serve.admin_key)
    page.button[0].click().run()
    assert page.metric
    assert not page.error


def test_a_refused_key_is_said_and_another_is_asked_for(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = open_page(monkeypatch, serve.url, serve.tenant_key)  # good, but no administrator's
    assert "refused the admin key" in page.error[0].value
    assert page.text_input[0].label == "Admin key"
    page.text_input[0].input(serve.admin_key)
    page.button[0].click().run()
    assert page.metric
    assert not page.error


def test_a_gateway_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    page = open_page(monkeypatch, f"http://127.0.0.1:{port}", "mty_aaaaaaaaaaaaaaaa." + "b" * 32)
    assert "does not answer" in page.error[0].value
    assert not page.exception


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it where it may")
def test_a_browser_shows_the_page_without_an_error_or_a_request_to_elsewhere(serve: Any, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    address = next(line.split()[1] for line in serve.output.splitlines() if line.startswith("  dashboard"))
    serve.wait_for_line("Uvicorn server started")
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1350})
        page.set_default_timeout(DEADLINE_S * 1000)
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: None if is_local(sent.url, address) else complaints.append(sent.url))
        page.goto(address)
        page.get_by_text("serving moiety-demo").wait_for()
        page.get_by_role("heading", name="Keys").wait_for()
        page.locator(".mark-rect.role-mark path").first.wait_for(state="attached")
        shown = page.inner_text("body")
        page.screenshot(path=tmp_path / "overview.png")
        serve.part("gateway").send_signal(signal.SIGSTOP)  # the page must say so, and recover
        page.get_by_text("does not answer").wait_for()
        serve.part("gateway").send_signal(signal.SIGCONT)
        page.get_by_text("serving moiety-demo").wait_for()
        browser.close()
    assert complaints == []
    assert "Requests, 24 h" in shown
    assert (tmp_path / "overview.png").stat().st_size > 20_000


def is_local(url: str, address: str) -> bool:
    return url.startswith((address, address.replace("http", "ws"), "data:", "blob:"))
