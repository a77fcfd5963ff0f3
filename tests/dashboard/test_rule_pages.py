"""Pages of routes and guardrails against a real gateway: set, replace, and what the gateway refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from moiety_dashboard.client import AdminClient

from .test_pages import open_app, sign_in

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any]) -> Any:
    """A serve that nobody has used."""
    running = start_serve("--no-dashboard")
    running.wait_for_line("moiety is ready at")
    return running


def open_page(monkeypatch: pytest.MonkeyPatch, serve: Any, path: str) -> AppTest:
    app = sign_in(open_app(monkeypatch, serve.url), serve.admin_key)
    app._page_hash = calc_hash(path)
    return app.run()


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def listed(serve: Any, path: str) -> list[dict[str, Any]]:
    with httpx.Client() as http:
        found: list[dict[str, Any]] = AdminClient(serve.url, serve.admin_key, http).get(path).data["data"]
        return found


def test_a_route_is_set_and_replaced_on_its_page(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_page(monkeypatch, serve, "routes")
    app.text_input(key="route name").input("page-route")
    app.multiselect(key="route new route targets").set_value(["moiety-demo"])
    press(app, "Set route")
    assert not app.exception and not app.error
    (made,) = [one for one in listed(serve, "/routes") if one["name"] == "page-route"]
    assert made["targets"] == [{"model": "moiety-demo", "weight": 1}]
    assert (made["downgrade_model"], made["shadow_model"], made["sticky"]) == (None, None, "none")
    app.selectbox(key="chosen route").set_value("page-route").run()
    app.selectbox(key="route page-route sticky").set_value("tenant")
    press(app, "Set route")
    assert not app.exception and not app.error
    (changed,) = [one for one in listed(serve, "/routes") if one["name"] == "page-route"]
    assert changed == made | {"sticky": "tenant"}


def test_a_guardrail_is_set_on_its_page_and_a_wrong_one_is_refused(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_page(monkeypatch, serve, "guardrails")
    press(app, "Set guardrail")
    assert "'name' must have" in app.error[0].value
    app.text_input(key="guardrail name").input("page-guardrail")
    app.selectbox(key="guardrail new guardrail action").set_value("observe")
    press(app, "Set guardrail")
    assert not app.exception and not app.error
    (made,) = [one for one in listed(serve, "/guardrails") if one["name"] == "page-guardrail"]
    assert (made["stage"], made["action"], made["on_failure"]) == ("input", "observe", "closed")
    assert (made["detectors"], made["tenant_id"]) == (["secrets", "card_numbers"], None)
