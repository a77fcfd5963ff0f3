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

    policy = {"makes_keys": True, "max_keys": 2, "max_days": None, "allowed_models": None, "limits": {}}
    me = {"key_policy": policy, "num_active_keys": num_active}
    project = {"id": "prj_a", "name": "production", "tenant_id": "ten_a"}
    own_keys.draw_keys(None, Client(), Answer([], "/me/keys"), [project], me)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_active", "is_offered"), [(1, True), (2, False)])
def test_a_key_is_offered_only_to_users_who_may_have_more(num_active: int, is_offered: bool) -> None:
    app = AppTest.from_function(own_keys_page, default_timeout=120, args=(num_active,)).run()
    assert not app.exception
    assert ("Make key" in {button.label for button in app.button}) is is_offered
    assert [one.value for one in app.info] == (
        [] if is_offered else ["You have 2 active keys, and your tenant allows 2. Revoke one to make another."]
    )
