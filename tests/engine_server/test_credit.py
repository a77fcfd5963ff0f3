from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moiety_engine.scripted.script import Script
from moiety_wire.messages import Extend, Finished, FinishReason, Heartbeat, Stopping, Tokens

extensions = st.lists(st.integers(0, 40), max_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.integers(0, 10),
    more=extensions,
    tokens_per_step=st.integers(1, 7),
    max_tokens=st.integers(1, 40),
    ends_by_refusal=st.booleans(),
    gathers=st.booleans(),
)
def test_no_gateway_ever_gets_more_tokens_than_the_credit_it_has_given(
    bench: Any,
    submit: Any,
    first: int,
    more: list[int],
    tokens_per_step: int,
    max_tokens: int,
    ends_by_refusal: bool,
    gathers: bool,
) -> None:
    async def converse() -> None:
        async with bench(Script(tokens_per_step=tokens_per_step), heartbeat_interval_s=0.002) as running:
            gateway = running.connect()
            stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
            await gateway.send(submit(prompt="abc", credit_tokens=first, stopping=stopping, gathers=gathers))
            await gateway.greet()
            await gateway.until(lambda: gateway.answers)  # the verdict
            answer, credit = gateway.answers["r"], first

            async def settle() -> None:
                """Wait until the request has ended or waits for credit, by a Load sent after all earlier messages."""
                await gateway.send(Heartbeat(0))
                await gateway.until(
                    lambda: (
                        answer.end is not None
                        or (gateway.loads[-1].num_paused and gateway.loads[-1].output_tokens_total == credit)
                    )
                )

            await settle()
            for i, total in enumerate(more):
                if answer.end is not None:
                    break
                credit = max(credit, total)
                await gateway.send(Extend("r", i + 1, total))
                await settle()
                assert len(answer.token_ids) == credit if answer.end is None else len(answer.token_ids) <= credit
            if answer.end is None and ends_by_refusal:
                await gateway.send(Extend("r", len(more) + 1, 0, last=True))
                await gateway.finish()
                ended: Any = answer.end  # by what was awaited
                assert (ended.reason, ended.detail) == (FinishReason.LENGTH, "credit_refused")
                assert len(answer.token_ids) == credit
            elif answer.end is None:
                await gateway.send(Extend("r", len(more) + 1, max_tokens))
                await gateway.finish()
            if answer.end.detail == "max_tokens":
                assert len(answer.token_ids) == max_tokens
            await gateway.until_idle()

    asyncio.run(converse())


async def test_tokens_of_unstreamed_requests_are_sent_in_groups_after_the_first(bench: Any, submit: Any) -> None:
    async with bench() as running:
        gateway = running.connect()
        await gateway.send(submit(prompt="abc", stopping=Stopping(max_tokens=100, ignore_eos=True), gathers=True))
        messages = [await gateway.receive()]
        while not isinstance(messages[-1], Finished):
            messages.append(await gateway.receive())
        counts = [len(message.token_ids) for message in messages if isinstance(message, Tokens)]
        assert counts == [1, 16, 16, 16, 16, 16, 16, 3]
        assert gateway.answers["r"].text == ("abc" * 34)[:100]
