"""Experts' load over the admin API and in the metrics, against sums done by hand."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.experts.service import KEPT_S
from moiety_wire.experts import (
    OTHER_TENANTS,
    ExpertBalance,
    ExpertInterval,
    ExpertLoad,
    TenantTokens,
    pack_counts,
    pack_shares,
)

from .conftest import NewCard, RunningGateway, StartGateway

MINUTE = 1_800_000_000


def load(picks: Any, tenants: Any, *, steps: int = 4, active: tuple[int, ...] = (4, 6)) -> Any:
    """Of a model with experts in layers 1 and 3: four, of which a token goes to two."""
    rows = [picks[:4], picks[4:]]
    sums, busiest = (pack_counts(map(of, rows)) for of in (sum, max))
    interval = ExpertInterval(MINUTE, steps, sums, busiest, pack_counts(active))
    told = [TenantTokens(name, tokens) for name, tokens in tenants.items()]
    return ExpertLoad(1, MINUTE, MINUTE + 9, (1, 3), 4, 2, pack_counts(picks), [interval], told, 1000)


async def get(gateway: RunningGateway, path: str = "", key: str | None = None, expect: int = 200) -> Any:
    status, _, answer = await gateway.request("GET", f"/admin/v1/experts{path}", b"", key or gateway.admin_key)
    assert status == expect, answer
    return json.loads(answer)


@pytest.fixture
def engines(new_card: NewCard) -> list[FakeEngineClient]:
    return [FakeEngineClient(new_card("engine-1", "tiny")), FakeEngineClient(new_card("engine-2", "tiny"))]


async def test_engines_of_a_model_are_added_up_and_one_can_be_named(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    async with start_gateway(engines) as gateway:
        tenant = gateway.keys.tenant_id
        engines[0].expert_loads[None] = load([5, 5, 5, 5, 20, 0, 0, 0], {tenant: 6, OTHER_TENANTS: 4})
        engines[1].expert_loads[None] = load([3, 1, 1, 1, 3, 3, 0, 0], {tenant: 3}, steps=2, active=(6, 2))
        (one,) = (await get(gateway))["data"]
        assert (one["model"], one["engine_ids"], one["num_silent"]) == ("tiny", ["engine-1", "engine-2"], 0)
        assert (one["layers"], one["num_experts"], one["experts_per_token"]) == ([1, 3], 4, 2)
        assert one["picks"] == [[8, 6, 6, 6], [23, 3, 0, 0]]
        # each engine has its own busiest expert: 26 picks on 4 experts and at most 5 and 3; then 26, and 20 and 3
        by_layer = [round(26 / 4 / 8, 4), round(26 / 4 / 23, 4)]
        assert one["balancedness_by_layer"] == by_layer
        assert one["balancedness"] == round(52 / 4 / 31, 4)
        assert one["active_experts_by_layer"] == [round(10 / 6, 2), round(8 / 6, 2)]
        tenants = [(each["tenant_id"], each["tokens"]) for each in one["tenants"]]
        assert tenants == [(tenant, 9), (None, 4)]
        assert one["tenants"][0]["tenant_name"]
        assert one["tokens"] == 13
        (minute,) = one["minutes"]
        assert (minute["tokens"], minute["balancedness_by_layer"]) == (13, by_layer)
        assert minute["active_experts"] == 1.5
        (second,) = (await get(gateway, "?engine_id=engine-2&minutes=5"))["data"]
        assert (second["engine_ids"], second["tokens"]) == (["engine-2"], 3)
        assert (await get(gateway, "?model=another"))["data"] == []


async def test_placement_of_moving_experts_is_shown_to_administrators_of_all_tenants(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    async with start_gateway(engines) as gateway:
        tenant = gateway.keys.tenant_id
        engines[0].expert_loads[None] = still = load([5] * 8, {tenant: 10})
        slots = [0, 1, 2, 2, 3, 0, 3, 3, 1, 0, 2, 3]  # of two layers, three in each of two parts
        moving = msgspec.structs.replace(still, num_parts=2, slots_LR=pack_counts(slots))
        engines[1].expert_loads[None] = moving
        (one,) = (await get(gateway))["data"]
        assert one["places"] == [{"engine_id": "engine-2", "parts": 2, "slots": [slots[:6], slots[6:]]}]


async def test_an_engine_that_does_not_answer_is_counted_and_a_model_without_experts_says_so(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    engines[1].expert_loads[None] = ExpertLoad(1, MINUTE, MINUTE)
    async with start_gateway(engines) as gateway:
        (one,) = (await get(gateway))["data"]
        assert (one["layers"], one["picks"], one["balancedness"]) == ([], [], None)
        engines[1].die()
        assert (await get(gateway, "?minutes=9"))["data"] == []


async def test_a_window_that_is_none_is_refused(start_gateway: StartGateway, engines: list[FakeEngineClient]) -> None:
    async with start_gateway(engines) as gateway:
        for wrong in ("61", "-1", "many"):
            assert (await get(gateway, f"?minutes={wrong}", expect=400))["error"]["param"] == "minutes"


async def test_a_tenants_administrator_sees_its_own_load_and_no_engines(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    async with start_gateway(engines[:1]) as gateway:
        tenant = gateway.keys.tenant_id
        body = json.dumps({"name": "boss", "role": "tenant-admin", "tenant_id": tenant}).encode()
        _, _, made = await gateway.request("POST", "/admin/v1/keys", body, gateway.admin_key)
        key = json.loads(made)["secret"]
        engines[0].expert_loads[None] = load([9] * 8, {tenant: 2, "ten_another": 16})
        own = load([2, 2, 0, 0, 4, 0, 0, 0], {tenant: 2}, steps=0, active=())
        own = msgspec.structs.replace(own, num_parts=2, slots_LR=pack_counts([*range(4), *range(4)]))
        engines[0].expert_loads[tenant] = own
        engines[0].expert_loads["ten_another"] = load([7] * 8, {"ten_another": 14})
        (one,) = (await get(gateway, key=key))["data"]
        assert (one["engine_ids"], one["picks"], one["tokens"]) == ([], [[2, 2, 0, 0], [4, 0, 0, 0]], 2)
        assert [each["tenant_id"] for each in one["tenants"]] == [tenant]
        assert (one["active_experts_by_layer"], one["minutes"][0]["active_experts"]) == (None, None)
        assert one["places"] == []
        for path in ("?tenant_id=ten_another", "?engine_id=engine-1"):
            assert (await get(gateway, path, key=key))["data"] == []
        (others,) = (await get(gateway, "?tenant_id=ten_another"))["data"]
        assert others["tokens"] == 14


async def test_engines_are_not_asked_again_within_a_moment(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    engines[0].expert_loads[None] = load([1] * 8, {"a": 2})
    async with start_gateway(engines[:1]) as gateway:
        assert (await get(gateway))["data"][0]["tokens"] == 2
        engines[0].expert_loads[None] = load([2] * 8, {"a": 4})
        assert KEPT_S > 1
        assert (await get(gateway))["data"][0]["tokens"] == 2
        assert (await get(gateway, "?minutes=5"))["data"][0]["tokens"] == 4


async def test_a_plan_is_held_against_experts_in_their_order(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    engines[0].expert_loads[None] = load([30, 10, 10, 10, 20, 20, 0, 0], {"a": 25})
    async with start_gateway(engines[:1]) as gateway:

        async def plan(body: dict[str, Any], expect: int = 200) -> Any:
            data = json.dumps({"model": "tiny", **body}).encode()
            status, _, answer = await gateway.request("POST", "/admin/v1/experts/plan", data, gateway.admin_key)
            assert status == expect, answer
            return json.loads(answer)

        told = await plan({"ranks_per_node": 2})
        # two ranks: 40 and 20, 40 and 0; at best 30 and 30, 20 and 20
        assert (told["by_layer_before"], told["balancedness_before"]) == ([0.75, 0.5], 0.625)
        assert (told["balancedness_after"], told["slots_per_rank"]) == (0.8333, 2)  # no two experts have 30: 40 and 20
        assert told["replicas"] == [[1] * 4] * 2
        more = await plan({"ranks_per_node": 2, "redundant_experts": 1})
        assert (more["slots_per_rank"], more["balancedness_after"]) == (3, 1.0)  # one more is rounded up to two
        assert [sum(layer) for layer in more["replicas"]] == [6, 6]
        assert more["replicas"][0][0] >= 2  # the busiest is on both
        assert more["moved_bytes"] == more["moved_experts"] * 1000 > 0
        assert "there is no load" in (await plan({"model": "another"}, expect=404))["error"]["message"]
        assert "ranks_per_node" in (await plan({"ranks_per_node": 0}, expect=400))["error"]["message"]


async def test_metrics_tell_the_balance_of_each_layer(
    start_gateway: StartGateway, engines: list[FakeEngineClient]
) -> None:
    engines[0].balance = ExpertBalance(
        5, (1, 3), 64, 0.5, pack_shares([0.25, 0.75]), pack_shares([1, 2, 3, 4, 0.5, 1, 1, 1.5]), pack_shares([3, 4])
    )
    async with start_gateway(engines) as gateway:
        _, _, answer = await gateway.request("GET", "/metrics")
    found = {line for line in answer.decode().splitlines() if line.startswith("moiety_expert_")}
    engine = 'engine="fake://engine-1"'
    assert found == {
        f"moiety_expert_picks_total{{{engine}}} 64.0",
        f"moiety_expert_balancedness{{{engine}}} 0.5",
        *(f'moiety_expert_layer_balancedness{{{engine},layer="{one}"}} {x}' for one, x in ((1, 0.25), (3, 0.75))),
        *(f'moiety_expert_active{{{engine},layer="{one}"}} {x}' for one, x in ((1, 3.0), (3, 4.0))),
        *(
            f'moiety_expert_load_ratio{{{engine},layer="{one}",quantile="{quantile}"}} {x}'
            for one, xs in ((1, (1.0, 2.0, 3.0, 4.0)), (3, (0.5, 1.0, 1.0, 1.5)))
            for quantile, x in zip(("0.5", "0.9", "0.99", "1"), xs, strict=True)
        ),
    }
