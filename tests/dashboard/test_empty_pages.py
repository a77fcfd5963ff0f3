"""An empty part of a page advises only what the role of its user may do."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest


def empty_parts(may: list[str]) -> None:
    """Script that draws the parts of pages without data for a user who may do these actions."""
    import streamlit as st

    from moiety_dashboard import session
    from moiety_dashboard.client import Answer
    from moiety_dashboard.views import adapters, catalogue, experts, prices, quotas, spend, webhooks
    from moiety_dashboard.views.tenants import keys, limits
    from moiety_dashboard.views.traces.kept import kept
    from moiety_dashboard.views.traces.one import why_no_steps

    class Client:
        def get(self, path: str, **_: object) -> Answer:
            return Answer({"data": [], "truncated": False}, path)

        def get_all(self, asked: list[tuple[str, object]]) -> list[Answer]:
            return [self.get(path) for path, _ in asked]

        def list(self, path: str, **_: object) -> Answer:
            return Answer([], path)

    class Page:
        def asking(self, *_: object) -> object:
            from contextlib import nullcontext

            return nullcontext(Client())

    st.session_state[session.CALLER] = {"tenant_id": None, "may": may, "role": "viewer"}
    client = Client()
    st.caption(spend.nobody())
    spend.draw_budgets(client.get("/spend/budgets"), {})
    adapters.draw_list(client)
    prices.draw(Page())
    limits.draw(client, {"id": "ten_a", "name": "a"})
    keys.draw(Page(), client, {"id": "ten_a", "name": "a"})
    quotas.draw_live(client)
    webhooks.draw_list(client)
    catalogue.draw_models(client)
    experts.choose_model([], st)
    experts.choose_model([{"model": "dense", "layers": []}], st)
    st.caption(kept())
    st.caption(why_no_steps())


ADVICE = ("Set prices with", "Set one on the Tenants page", "Upload one with", "Set one below", "Set a quota below",
          "Create one below and send", "alerts. Create one below", "Start an engine", "Start one with", "Serve an MoE",
          "Set `MOIETY_TRACE_SAMPLE_RATE=1`", "Raise the number with")  # fmt: skip
ACTIONS = ("prices.write", "quotas.write", "tenant_quotas.write", "adapters.write", "keys.write", "webhooks.write",
           "engines.sleep")  # fmt: skip


@pytest.mark.parametrize("may", [(), ACTIONS])
def test_advice_is_for_roles_that_can_follow_it(may: tuple[str, ...]) -> None:
    app = AppTest.from_function(empty_parts, default_timeout=120, args=(list(may),)).run()
    assert not app.exception
    said = [one.value for one in (*app.caption, *app.info)]
    assert any("No price is set" in text for text in said)
    assert [advice for advice in ADVICE if any(advice in text for text in said)] == (list(ADVICE) if may else [])
