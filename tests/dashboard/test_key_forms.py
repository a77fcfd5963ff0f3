"""Money in the forms of keys: what is entered is sent exactly."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamlit.testing.v1 import AppTest

from moiety_dashboard.views.key_forms import _most, dollars_of, nano_of


@given(st.integers(0, 10**15 - 1))
def test_an_amount_of_up_to_15_digits_is_sent_as_it_was_entered(nano: int) -> None:
    assert nano_of(dollars_of(nano)) == nano
    assert nano_of(float(f"{Decimal(nano) / 1000:f}")) == nano * 10**6


@pytest.mark.parametrize(("nano", "words"), [(1_234_567_890_000_000, "max 1234567.89"), (2 * 10**9, "max 2")])
def test_the_highest_amount_is_shown_with_all_digits(nano: int, words: str) -> None:
    assert _most(nano, is_money=True) == words


def own_keys_page(num_active: int) -> None:
    """Script that draws the keys of a developer whose tenant allows two."""
    from moiety_dashboard.client import Answer
    from moiety_dashboard.views import own_keys

    class Client:
        def get(self, path: str, **_: object) -> Answer:
            return Answer({"data": []}, path)

        def change(self, *_: object) -> object:
            return {"secret": "mty_secret"}

    policy: dict[str, object] = {
        "makes_keys": True,
        "max_keys": 2,
        "max_days": None,
        "allowed_models": None,
        "limits": {},
    }
    me = {"key_policy": policy, "num_active_keys": num_active}
    project = {"id": "prj_a", "name": "production", "tenant_id": "ten_a"}
    own_keys.draw_keys(None, Client(), Answer([], "/me/keys"), [project], me)


@pytest.mark.parametrize(("num_active", "is_offered"), [(1, True), (2, False)])
def test_a_key_is_offered_only_to_users_who_may_have_more(num_active: int, is_offered: bool) -> None:
    app = AppTest.from_function(own_keys_page, default_timeout=120, args=(num_active,)).run()
    assert not app.exception
    assert ("Make key" in {button.label for button in app.button}) is is_offered
    assert [one.value for one in app.info] == (
        [] if is_offered else ["You have 2 active keys, and your tenant allows 2. Revoke one to make another."]
    )


def test_the_form_of_a_key_is_empty_after_it_made_one() -> None:
    app = AppTest.from_function(own_keys_page, default_timeout=120, args=(1,)).run()
    app.text_input[0].input("laptop")
    app.number_input[0].set_value(60)
    next(button for button in app.button if button.label == "Make key").click()
    app.run()
    assert not app.exception and app.code[-1].value == "mty_secret"
    assert (app.text_input[0].value, app.number_input[0].value) == ("", None), "a second press makes no second key"


def quotas_of_a_rotated_key() -> None:
    """Script that draws the quotas of a tenant whose only key was rotated."""
    import streamlit as st

    from moiety_dashboard import session
    from moiety_dashboard.client import Answer
    from moiety_dashboard.views.tenants import limits

    quota = {"id": "quo_a", "level": "key", "scope_id": "old", "kind": "tokens_per_day", "cap": 900, "used": 0,
             "reserved": 0, "resets_at": None, "created_at": "2026-01-01T00:00:00Z",
             "alert_at": [80]}  # fmt: skip
    key = {"name": "laptop", "project_id": "prj_a"}
    keys = [key | {"id": "old", "hint": "aaaa", "status": "expired", "replaced_by": "new"},
            key | {"id": "new", "hint": "bbbb", "status": "active", "replaced_by": None}]  # fmt: skip

    class Client:
        def list(self, path: str, **_: object) -> Answer:
            return Answer({"/quotas": [quota], "/keys": keys}.get(path, []), path)

        def get(self, path: str, **_: object) -> Answer:
            return Answer({"data": []}, path)

        def change(self, _method: str, _path: str, body: object) -> None:
            st.session_state["put"] = body

    st.session_state[session.CALLER] = {"tenant_id": None, "may": ["quotas.write"], "role": "operator"}
    limits.draw(Client(), {"id": "ten_a", "name": "acme"})


def test_the_quota_of_a_rotated_key_has_the_name_of_its_successor_and_can_be_deleted() -> None:
    app = AppTest.from_function(quotas_of_a_rotated_key, default_timeout=120).run()
    assert not app.exception
    assert list(app.dataframe[0].value["scope"]) == ["key laptop …bbbb"]
    choices = {one.label: one.options for one in app.selectbox}
    assert choices["Quota"] == ["900 tokens per day on key laptop …bbbb"]


def test_a_quota_has_the_percentages_at_which_it_alerts() -> None:
    app = AppTest.from_function(quotas_of_a_rotated_key, default_timeout=120).run()
    assert list(app.dataframe[0].value["alerts"]) == ["80 %"]
    (field,) = app.multiselect
    assert field.value == [80]
    field.set_value([100, 80])
    next(button for button in app.button if button.label == "Set quota").click()
    app.run()
    assert not app.exception
    kept = {"level": "key", "scope_id": "new", "kind": "tokens_per_day", "cap": 900}
    assert app.session_state["put"] == kept | {"alert_at": [80, 100]}
    next(one for one in app.selectbox if one.label == "Kind").set_value("requests_per_minute")
    app.run()
    assert not app.multiselect, "a rate has no share that is used up"
