"""Speculative prefill of the next turn: what the engine gets, what it costs, and that it is off for tenants without
it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest
from anthropic import AsyncAnthropic
from prometheus_client import generate_latest

from moiety_platform.engine_client.fake import FakeEngineClient, admit
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import ModelCard, Submit

from .conftest import RunningGateway, StartGateway, Until
from .test_quotas import limit, used
from .test_tool_loops import OPENAI_TOOLS, hermes, prompt_of

FIRST: list[Any] = [{"role": "user", "content": "Is it warm?"}]
SAID = "<think>\nHm, 17.\n</think>\n\nYes, quite."


@pytest.fixture
def foreseeing(
    start_gateway: StartGateway, thinking_card: ModelCard, until: Until
) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """A gateway whose model thinks, and whose one tenant has its next turns foreseen; the prompts of requests and those
    that were foreseen are told as texts."""

    @asynccontextmanager
    async def start(
        speculative_prefill: str = "free", *, able: bool = True, answer: Any = SAID, **settings: Any
    ) -> AsyncIterator[Any]:
        engine = FakeEngineClient(msgspec.structs.replace(thinking_card, speculative_prefill=able))
        tokenizer = Tokenizer.from_json(thinking_card.tokenizer_json)
        ids = tokenizer.encode(answer)
        engine.script = lambda submit: [(one, tokenizer.decode([one], skip_special_tokens=False)) for one in ids]
        running: Any  # a gateway, and what the tests of this file ask it
        async with start_gateway([engine], stores_usage=True, **settings) as running:
            gateway = running
            (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
            changed = await gateway.admin(
                "PATCH", f"/tenants/{tenant['id']}", {"speculative_prefill": speculative_prefill}
            )
            assert changed["speculative_prefill"] == speculative_prefill
            gateway.forget_keys()
            gateway.tenant_id = tenant["id"]

            def prompts(*, foreseen: Any) -> Any:
                wanted = [one for one in engine.submits if (one.speculative_prefill is not None) == foreseen]
                return [prompt_of(one, engine) for one in wanted]

            async def outcomes() -> Any:
                text = generate_latest(gateway.metrics.registry).decode()
                return [line for line in text.splitlines() if line.startswith("moiety_speculative_prefill_total")]

            async def told() -> Any:
                """Wait until speculative prefill has an outcome, and return all outcomes."""
                await until(lambda: b"moiety_speculative_prefill_total{" in generate_latest(gateway.metrics.registry))
                return await outcomes()

            gateway.prompts, gateway.outcomes, gateway.told = prompts, outcomes, told
            yield gateway

    return start


async def ask(gateway: RunningGateway, messages: list[dict[str, Any]] = FIRST, **more: Any) -> Any:
    return await gateway.client.chat.completions.create(model="hermes", messages=messages, **more)


async def sums(gateway: RunningGateway, by: str = "tenant") -> Any:
    await gateway.stored_usage.flush()
    return (await gateway.admin("GET", f"/usage?group_by={by}"))["data"]


@pytest.mark.parametrize("stream", [False, True])
async def test_speculative_prefill_computes_the_prefix_of_the_next_turns_prompt(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]], stream: bool
) -> None:
    async with foreseeing() as gateway:
        answer = await ask(gateway, stream=stream)
        if stream:
            [chunk async for chunk in answer]
        assert await gateway.told() == ['moiety_speculative_prefill_total{model="hermes",outcome="computed"} 1.0']
        (foreseen,) = gateway.prompts(foreseen=True)
        assert "Yes, quite." in foreseen
        assert "Hm, 17." not in foreseen, "later prompts leave thoughts out"
        turn = [*FIRST, {"role": "assistant", "content": "Yes, quite."}, {"role": "user", "content": "How warm?"}]
        await ask(gateway, turn)
        first, second = gateway.prompts(foreseen=False)
        assert second.startswith(foreseen)
        assert second[len(foreseen) :].startswith("How warm?"), "all but the new words was foreseen"
        (submit,) = [one for one in gateway.engine.submits if one.speculative_prefill is not None][:1]
        before = submit.prompt_ids[: submit.speculative_prefill.num_shared] + submit.speculative_prefill.other_ids
        assert Tokenizer.from_json(gateway.engine.card.tokenizer_json).decode(before, skip_special_tokens=False) == (
            first + SAID
        )


async def test_it_is_no_request_and_what_came_true_is_counted_with_the_turn_that_it_was_for(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]],
) -> None:
    async with foreseeing() as gateway:
        await ask(gateway)
        await gateway.told()
        size = len(next(one for one in gateway.engine.submits if one.speculative_prefill is not None).prompt_ids)
        (before,) = await sums(gateway)
        assert (before["totals"]["requests"], before["totals"]["speculative_tokens"]) == (1, size)
        assert before["totals"]["speculative_used_tokens"] == 0
        prompt = before["totals"]["prompt_tokens"]
        assert prompt == len(gateway.engine.submits[0].prompt_ids)
        turn = [*FIRST, {"role": "assistant", "content": "Yes, quite."}, {"role": "user", "content": "?"}]
        await ask(gateway, turn, n=2)  # after two answers at once the next turn is not known
        by_class = {one["group"]["service_class"]: one["totals"] for one in await sums(gateway, "service_class")}
        assert (by_class["speculative_prefill"]["requests"], by_class["speculative_prefill"]["speculative_tokens"]) == (
            0,
            size,
        )
        (served,) = [totals for name, totals in by_class.items() if name != "speculative_prefill"]
        assert (served["requests"], served["speculative_used_tokens"], served["speculative_tokens"]) == (2, size, 0)
        rows = (await gateway.admin("GET", "/usage/requests"))["data"]
        assert [row["speculative_used_tokens"] for row in rows] == [size, 0]
        books = await gateway.admin("GET", "/usage/reconciliation")
        assert (books["agrees"], books["total"]["requests"]) == (True, 2)


async def test_speculative_prefill_is_billed_once_at_the_input_price_within_quotas(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]],
) -> None:
    async with foreseeing("charged") as gateway:
        price = {"model": "hermes", "input": "1", "cached_input": "0.1", "output": "1"}
        await gateway.admin("PUT", "/prices", price)
        day = await limit(gateway, "tenant", 10_000)
        await limit(gateway, "tenant", 1, "requests_per_minute")
        await ask(gateway)
        assert await gateway.told() == ['moiety_speculative_prefill_total{model="hermes",outcome="computed"} 1.0'], (
            "no request"
        )
        asked, foreseen = gateway.engine.submits
        groups = {one["group"]["service_class"]: one["totals"] for one in await sums(gateway, "service_class")}
        assert groups["speculative_prefill"]["cost_nanodollars"] == 1000 * len(foreseen.prompt_ids)
        answer = len(Tokenizer.from_json(gateway.engine.card.tokenizer_json).encode(SAID))
        assert await used(gateway, day) == len(asked.prompt_ids) + answer + len(foreseen.prompt_ids)
        assert (await gateway.admin("GET", "/usage/reconciliation"))["agrees"]


async def test_speculative_prefill_does_not_run_when_a_quota_is_used_up(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]], until: Until
) -> None:
    async with foreseeing("charged") as gateway:
        size = (await ask(gateway)).usage.total_tokens
        await gateway.told()
        day = await limit(gateway, "tenant", size + 5)
        await ask(gateway)
        await until(
            lambda: (
                b'moiety_speculative_prefill_total{model="hermes",outcome="limited"} 1.0'
                in generate_latest(gateway.metrics.registry)
            )
        )
        assert await used(gateway, day) == size
        assert len(gateway.prompts(foreseen=True)) == 1


@pytest.mark.parametrize(("speculative_prefill", "able"), [("off", True), ("free", False)])
async def test_speculative_prefill_requires_the_tenants_setting_and_the_engines_support(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]], speculative_prefill: str, able: bool
) -> None:
    async with foreseeing(speculative_prefill, able=able) as gateway:
        await ask(gateway)
        await ask(gateway)
        assert (len(gateway.engine.submits), await gateway.outcomes()) == (2, [])


async def test_speculative_prefill_covers_the_turn_with_a_tools_result(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]],
) -> None:
    async with foreseeing(answer=hermes(("now", "{}"))) as gateway:
        said = (await ask(gateway, tools=OPENAI_TOOLS)).choices[0].message
        await gateway.told()
        (foreseen,) = gateway.prompts(foreseen=True)
        assert [one.speculative_prefill.pattern[-7:] for one in gateway.engine.submits if one.speculative_prefill] == [
            ":call:0"
        ]
        result: dict[str, Any] = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "noon"}
        await ask(gateway, [*FIRST, said.model_dump(exclude_none=True), result], tools=OPENAI_TOOLS)
        assert gateway.prompts(foreseen=False)[1].startswith(foreseen)


async def test_speculative_prefill_covers_conversations_of_every_api(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]],
) -> None:
    async with foreseeing() as gateway:
        async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
            await client.messages.create(model="hermes", max_tokens=100, messages=FIRST)
        await gateway.told()
        (foreseen,) = gateway.prompts(foreseen=True)
        assert "Yes, quite." in foreseen


async def test_an_engine_lost_during_speculative_prefill_fails_no_request(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]],
) -> None:
    async with foreseeing("charged") as gateway:
        day = await limit(gateway, "tenant", 10_000)

        def verdict(submit: Submit) -> Any:
            if submit.speculative_prefill is not None:
                gateway.engine.die()
            return admit(submit)

        gateway.engine.verdict = verdict
        size = (await ask(gateway)).usage.total_tokens
        assert await gateway.told() == ['moiety_speculative_prefill_total{model="hermes",outcome="lost"} 1.0']
        assert await used(gateway, day) == size
        (totals,) = await sums(gateway)
        assert totals["totals"]["speculative_tokens"] == 0


@pytest.mark.parametrize("speculative_prefill", ["on", "", 1])
async def test_a_tenants_foresight_is_one_of_three_words(
    foreseeing: Callable[..., AbstractAsyncContextManager[Any]], speculative_prefill: int | str
) -> None:
    async with foreseeing() as gateway:
        path = f"/tenants/{gateway.tenant_id}"
        told = await gateway.admin("PATCH", path, {"speculative_prefill": speculative_prefill}, expect=400)
        assert "speculative_prefill" in told["error"]["message"]
