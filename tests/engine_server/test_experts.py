"""Questions of gateways about experts' load: each gets its own answer; who joins is told what the others were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moiety_engine.server.expert_queries import MAX_OPEN, ExpertQueries
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery, ScaleExpertRanks, pack_shares

BALANCE = ExpertBalance(5, (0, 1), 64, 0.5, pack_shares([0.5, 0.5]), pack_shares([1.0] * 8), pack_shares([2.0, 3.0]))


async def test_each_gateway_is_answered_under_its_own_number(bench: Any) -> None:
    async with bench() as running:
        gateways = [running.connect(), running.connect()]
        for gateway, query_id in zip(gateways, (7, 70), strict=True):
            await gateway.greet()
            await gateway.send(ExpertLoadQuery(query_id, 5), ExpertLoadQuery(query_id + 1, 0, "tenant"))
        for gateway, query_id in zip(gateways, (7, 70), strict=True):
            await gateway.until(lambda gateway=gateway: len(gateway.expert_loads) == 2)
            assert [load.query_id for load in gateway.expert_loads] == [query_id, query_id + 1]
            assert gateway.expert_loads[0].layers == ()  # the scripted core has no model


async def test_loads_report_the_expert_ranks_that_a_gateway_has_asked_for(bench: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.greet()
        await gateway.send(ScaleExpertRanks(3))
        load = await gateway.until_load(lambda load: load.expert_ranks == load.requested_expert_ranks == 3)
        assert load.expert_ranks_problem == ""


def test_an_answer_to_a_query_that_was_dropped_is_ignored() -> None:
    """The query of a gateway that is gone makes room for others, and its answer comes late."""
    sent: list[tuple[Any, ExpertLoad]] = []
    queries = ExpertQueries(lambda session, load: sent.append((session, load)))
    gone, here = SimpleNamespace(is_gone=True), SimpleNamespace(is_gone=False)
    for number in range(MAX_OPEN + 1):
        queries.add(gone if number < MAX_OPEN else here, ExpertLoadQuery(number, 0))
    first, *_, last = queries.take_queries()
    for ask in (first, last):
        queries.answer(ExpertLoad(ask.query_id, 0, 0))
    assert [session for session, _ in sent] == [here]


async def test_the_balance_is_told_to_those_who_are_there_and_to_who_joins(bench: Any) -> None:
    async with bench() as running:
        early = running.connect()
        await early.greet()
        running.front.on_message(BALANCE)
        late = running.connect()
        await late.greet()
        for gateway in (early, late):
            await gateway.until(lambda gateway=gateway: gateway.balances)
            assert gateway.balances == [BALANCE]
