"""Questions of gateways about experts' load: each gets its own answer; who joins is told what the others were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from moiety_engine.server.expert_queries import MAX_OPEN, ExpertQueries
from moiety_wire.experts import AskExperts, ExpertBalance, ExpertLoad, pack_shares

BALANCE = ExpertBalance(5, (0, 1), 64, 0.5, pack_shares([0.5, 0.5]), pack_shares([1.0] * 8), pack_shares([2.0, 3.0]))


async def test_each_gateway_is_answered_under_its_own_number(bench: Any) -> None:
    async with bench() as running:
        gateways = [running.connect(), running.connect()]
        for gateway, ask_id in zip(gateways, (7, 70), strict=True):
            await gateway.greet()
            await gateway.send(AskExperts(ask_id, 5), AskExperts(ask_id + 1, 0, "tenant"))
        for gateway, ask_id in zip(gateways, (7, 70), strict=True):
            await gateway.until(lambda gateway=gateway: len(gateway.expert_loads) == 2)
            assert [load.ask_id for load in gateway.expert_loads] == [ask_id, ask_id + 1]
            assert gateway.expert_loads[0].layers == ()  # the scripted core has no model


def test_an_answer_to_a_query_that_was_dropped_is_ignored() -> None:
    """The query of a gateway that is gone makes room for others, and its answer comes late."""
    sent: list[tuple[Any, ExpertLoad]] = []
    queries = ExpertQueries(lambda session, load: sent.append((session, load)))
    gone, here = SimpleNamespace(is_gone=True), SimpleNamespace(is_gone=False)
    for number in range(MAX_OPEN + 1):
        queries.add(gone if number < MAX_OPEN else here, AskExperts(number, 0))
    first, *_, last = queries.take_queries()
    for ask in (first, last):
        queries.answer(ExpertLoad(ask.ask_id, 0, 0))
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
