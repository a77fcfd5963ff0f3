"""Prices are exact, by model and class, and never below the reserved amount."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.classes.terms import Catalogue, ChosenClass, ClassTerms
from moiety_platform.inference.quota_reservation import Tariffs
from moiety_platform.prices.token_cost import ANY_CLASS, FREE, Price, PriceList, dollars, parse_dollars
from moiety_wire.classes import FLEX, STANDARD

amounts = st.integers(0, 10**12)
tenths = st.integers(0, 10)
prices = st.builds(lambda fresh, part, output: Price(fresh, fresh * part // 10, output), amounts, tenths, amounts)
tokens = st.integers(0, 10**6)


@given(price=prices, prompt=tokens, cached=tokens, output=tokens, more=tokens)
def test_more_tokens_never_cost_less_and_cached_ones_never_more(
    price: Price, prompt: int, cached: int, output: int, more: int
) -> None:
    cached = min(cached, prompt)
    cost = price.cost(prompt, cached, output)
    assert cost <= price.cost(prompt, 0, output) <= price.cost(prompt, 0, output + more)
    exact = (prompt - cached) * price.input + cached * price.cached_input + output * price.output
    assert 0 <= cost * 10**6 - exact < 10**6


@given(one=prices, other=prices, prompt=tokens, output=tokens)
def test_the_dearer_of_two_covers_both(one: Price, other: Price, prompt: int, output: int) -> None:
    most = one.most(other)
    assert most.cost(prompt, 0, output) >= max(price.cost(prompt, 0, output) for price in (one, other))


@given(st.integers(0, 10**15))
def test_dollars_are_read_as_they_are_written(nano: int) -> None:
    assert parse_dollars(dollars(nano)) == nano


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf", "1e7", "0.0000000001", "1,5"])
def test_invalid_prices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an amount"):
        parse_dollars(text)


def test_a_class_without_a_price_of_its_own_pays_the_models_times_its_factor() -> None:
    listed = PriceList({("m", ANY_CLASS): Price(100, 10, 1000), ("m", "batch"): Price(1, 1, 1)})
    assert listed.of("m", "flex", 0.5) == Price(50, 5, 500)
    assert listed.of("m", "batch", 0.5) == Price(1, 1, 1)
    assert listed.of("other", "flex", 0.5) is None


async def test_prices_are_set_changed_listed_and_deleted(admin: Any) -> None:
    body = {"model": "m", "input": "0.15", "output": "0.6"}
    assert await admin.call("PUT", "prices", 200, json=body) == {
        "model": "m", "service_class": None, "input": "0.15", "cached_input": "0.15", "output": "0.6",
    }  # fmt: skip
    await admin.call("PUT", "prices", 200, json={**body, "cached_input": "0.075"})
    await admin.call("PUT", "prices", 200, json={**body, "service_class": "flex", "output": "0.3"})
    listed = (await admin.call("GET", "prices", 200))["data"]
    assert [(row["service_class"], row["cached_input"]) for row in listed] == [(None, "0.075"), ("flex", "0.15")]
    await admin.call("DELETE", "prices", 200, params={"model": "m"})
    await admin.call("DELETE", "prices", 404, params={"model": "m"})
    assert len((await admin.call("GET", "prices", 200))["data"]) == 1


@pytest.mark.parametrize(
    "change",
    [{"input": "-1"}, {"output": "cheap"}, {"cached_input": "0.2"}, {"model": ""}, {"service_class": "none such"}],
)
async def test_a_price_that_makes_no_sense_is_refused(admin: Any, change: dict[str, str]) -> None:
    answer = await admin.call("PUT", "prices", 400, json={"model": "m", "input": "0.1", "output": "0.6", **change})
    assert answer["error"]["message"]


def test_requests_have_a_tariff_in_common_until_prices_or_classes_are_read_again() -> None:
    tariffs = Tariffs()
    catalogue = Catalogue({"standard": ClassTerms(STANDARD), "flex": ClassTerms(FLEX, price_factor=0.5)})
    chosen = ChosenClass(STANDARD, FLEX)
    listed = PriceList({("m", ANY_CLASS): Price(100, 10, 1000), ("m:a", "flex"): Price(300, 20, 40)})
    tariff = tariffs.of(listed, catalogue, chosen, "m", "m")
    assert tariff.prices == {"standard": Price(100, 10, 1000), "flex": Price(50, 5, 500)}
    assert (tariff.most_expensive, tariff.is_complete) == (Price(100, 10, 1000), True)
    assert tariffs.of(listed, catalogue, chosen, "m", "m") is tariff
    adapted = tariffs.of(listed, catalogue, chosen, "m:a", "m")
    assert adapted.prices == {"standard": Price(100, 10, 1000), "flex": Price(300, 20, 40)}
    assert adapted.most_expensive == Price(300, 20, 1000)
    free = tariffs.of(PriceList({}), catalogue, chosen, "m", "m")
    assert (free.prices, free.most_expensive, free.is_complete) == ({}, FREE, False)
    dearer = Catalogue({"standard": ClassTerms(STANDARD, price_factor=2.0), "flex": ClassTerms(FLEX)})
    assert tariffs.of(listed, dearer, chosen, "m", "m").prices["standard"] == Price(200, 20, 2000)
    alone = tariffs.of(listed, dearer, ChosenClass(STANDARD, None), "m", "m")
    assert set(alone.prices) == {"standard"}
