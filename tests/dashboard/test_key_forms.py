"""Money in the forms of keys: what is entered is sent exactly."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_dashboard.views.key_forms import _most, dollars_of, nano_of


@given(st.integers(0, 10**15 - 1))
def test_an_amount_of_up_to_15_digits_is_sent_as_it_was_entered(nano: int) -> None:
    assert nano_of(dollars_of(nano)) == nano
    assert nano_of(float(f"{Decimal(nano) / 1000:f}")) == nano * 10**6


@pytest.mark.parametrize(("nano", "words"), [(1_234_567_890_000_000, "max 1234567.89"), (2 * 10**9, "max 2")])
def test_the_highest_amount_is_shown_with_all_digits(nano: int, words: str) -> None:
    assert _most(nano, is_money=True) == words
