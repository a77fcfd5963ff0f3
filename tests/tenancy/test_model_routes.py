"""Routes and guardrails in the admin API, and the order in which the models of a route are tried."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tenancy.conftest import Admin, Demo, admin_app

from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.session import Database
from moiety_platform.guardrails.controller import GuardrailController
from moiety_platform.guardrails.terms import (
    ALL_TENANTS,
    Guardrail,
    GuardrailAction,
    GuardrailFailure,
    GuardrailStage,
    by_tenant,
)
from moiety_platform.model_routes.admin_resource import parse_targets, plain
from moiety_platform.model_routes.terms import ModelRoute, RouteTarget, models_in_order
from moiety_platform.webhooks.addresses import AddressPolicy

ROUTE: dict[str, Any] = {
    "name": "org/best", "targets": [{"model": "m", "weight": 9}, {"model": "n"}], "fallbacks": ["o"],
    "sticky": "tenant",
    "downgrade_model": "p", "downgrade_percent": 90, "shadow_model": "q", "shadow_percent": 2.5,
}  # fmt: skip


async def test_a_route_is_set_read_replaced_and_deleted_and_each_change_is_audited(admin: Admin) -> None:
    made = await admin.call("PUT", "routes", 200, json=ROUTE)
    targets = [{"model": "m", "weight": 9}, {"model": "n", "weight": 1}]
    assert {name: made[name] for name in ROUTE} == {**ROUTE, "targets": targets}
    assert (await admin.call("GET", "routes/one?route=org/best", 200)) == made
    replaced = await admin.call("PUT", "routes", 200, json={"name": "org/best", "targets": [{"model": "m"}]})
    assert (replaced["fallbacks"], replaced["downgrade_model"], replaced["sticky"]) == ([], None, "none")
    assert (await admin.call("GET", "routes", 200))["data"] == [replaced]
    assert (await admin.call("DELETE", "routes?route=org/best", 200)) == replaced
    await admin.call("GET", "routes/one?route=org/best", 404)
    entries = (await admin.call("GET", "audit", 200))["data"]
    changes = [entry["action"] for entry in entries if entry["object_kind"] == "routes"]
    assert sorted(changes) == ["change", "create", "delete"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"targets": []}, "targets"),
        ({"targets": [{"model": "m", "weight": 0}]}, "targets"),
        ({"targets": [{"model": "m"}, {"model": "m"}]}, "targets"),
        ({"targets": [{"model": "m", "weight": -1}]}, "targets"),
        ({"targets": [{"model": ""}]}, "targets"),
        ({"fallbacks": ["a", "a"]}, "fallbacks"),
        ({"sticky": "user"}, "sticky"),
        ({"downgrade_percent": None}, "downgrade_percent"),
        ({"downgrade_percent": 101}, "downgrade_percent"),
        ({"shadow_model": None}, "shadow_model"),
        ({"shadow_percent": 0}, "shadow_percent"),
        ({"name": "a\nb"}, "name"),
    ],
)
@pytest.mark.parametrize("dialect", ["sqlite"], indirect=True)
async def test_a_route_that_makes_no_sense_is_refused(admin: Admin, change: dict[str, Any], param: str) -> None:
    refused = await admin.call("PUT", "routes", 400, json={**ROUTE, **change})
    assert refused["error"]["param"] == param
    assert (await admin.call("GET", "routes", 200))["data"] == []


def route_of(weights: dict[str, int], *fallbacks: str) -> ModelRoute:
    targets = tuple(RouteTarget(model, weight) for model, weight in weights.items())
    return ModelRoute(name="r", targets=targets, fallbacks=fallbacks)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 100), min_size=1),
    st.lists(st.sampled_from("cdefg"), unique=True),
    st.none() | st.binary(max_size=8),
)
def test_each_model_is_tried_once_and_those_without_weight_only_as_fallbacks(
    weights: dict[str, int], fallbacks: list[str], key: bytes | None
) -> None:
    order = models_in_order(route_of(weights, *fallbacks), key)
    weighted = {model for model, weight in weights.items() if weight}
    assert len(order) == len(set(order)) and set(order) == weighted | set(fallbacks)
    assert set(order[: len(weighted)]) == weighted
    if key is not None:
        assert models_in_order(route_of(weights, *fallbacks), key) == order


def test_keys_follow_the_weights_and_a_larger_weight_takes_keys_from_the_others_only() -> None:
    keys = [str(number).encode() for number in range(4000)]
    before = {key: models_in_order(route_of({"a": 3, "b": 1}), key)[0] for key in keys}
    share = Counter(before.values())["a"] / len(keys)
    assert math.isclose(share, 0.75, abs_tol=0.04)
    after = {key: models_in_order(route_of({"a": 3, "b": 2}), key)[0] for key in keys}
    moved = {(before[key], after[key]) for key in keys if before[key] != after[key]}
    assert moved == {("a", "b")}


def test_targets_are_written_and_shown_in_one_form() -> None:
    assert parse_targets("small=90, a=b=10,large") == [
        {"model": "small", "weight": 90}, {"model": "a=b", "weight": 10}, {"model": "large", "weight": 1},
    ]  # fmt: skip
    for wrong in ("", "a=", "=1", "a=x", "a,,b"):
        with pytest.raises(ValueError, match="must be models with weights"):
            parse_targets(wrong)
    shown = plain({**ROUTE, "targets": [{"model": "m", "weight": 9}]})
    assert (shown["targets"], shown["shadow_model"], shown["downgrade_model"]) == ("m=9", "q 2.5 %", "p at 90 %")


async def test_a_guardrail_is_set_read_replaced_and_deleted_and_each_change_is_audited(
    database: Database, clock: ManualClock, demo: Demo
) -> None:
    controller = with_services(GuardrailController, reach=AddressPolicy())
    admin = Admin(admin_app(database, clock, more=[controller]), demo.admin_key)
    body = {"name": "g", "stage": "input", "detectors": ["secrets"]}
    made = await admin.call("PUT", "guardrails", 200, json=body)
    assert (made["action"], made["on_failure"], made["url"], made["tenant_id"]) == ("block", "closed", None, None)
    changed = await admin.call("PUT", "guardrails", 200, json={**body, "action": "observe"})
    assert (await admin.call("GET", "guardrails/g", 200)) == changed
    await admin.call("PUT", "guardrails", 404, json={**body, "tenant_id": "ten_nobody"})
    await admin.call("DELETE", "guardrails/g", 200)
    await admin.call("DELETE", "guardrails/g", 404)
    entries = (await admin.call("GET", "audit", 200))["data"]
    changes = [entry["action"] for entry in entries if entry["object_kind"] == "guardrails"]
    assert sorted(changes) == ["change", "create", "delete"]
    await admin.http.aclose()


def test_a_tenant_has_its_own_guardrails_beside_the_general_ones() -> None:
    def made(name: str, tenant_id: str | None) -> Guardrail:
        return Guardrail(
            name=name, tenant_id=tenant_id, stage=GuardrailStage.INPUT, action=GuardrailAction.BLOCK,
            on_failure=GuardrailFailure.OPEN,
        )  # fmt: skip

    general, own = made("a", None), made("b", "ten_b")
    assert by_tenant([general, own]) == {ALL_TENANTS: (general,), "ten_b": (general, own)}
    assert by_tenant([]) == {ALL_TENANTS: ()}
