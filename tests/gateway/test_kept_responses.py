"""Responses that are kept because a request asks for it: found again, continued, deleted, and bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import tokenizers
from sqlalchemy import event, func, select, text
from tests.database_clock import DatabaseClock

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.responses_api.models import StoredResponse
from moiety_platform.responses_api.store import ResponseStore
from moiety_wire.messages import ModelCard

from .conftest import NewCard, RunningGateway, StartGateway, Until

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
NEVER = "resp_" + "0" * 32


async def keep(gateway: RunningGateway, **fields: Any) -> Any:
    return await gateway.client.responses.create(**BODY | {"store": True} | fields)


async def num_kept(gateway: RunningGateway) -> int:
    async with gateway.database.read() as session:
        return (await session.scalar(select(func.count()).select_from(StoredResponse))) or 0


def last_prompt(gateway: RunningGateway) -> str:
    tokenizer = tokenizers.Tokenizer.from_str(gateway.engine.card.tokenizer_json)
    return tokenizer.decode(gateway.engine.submits[-1].prompt_ids)


async def new_key(gateway: RunningGateway, **fields: Any) -> str:
    """Another key of the demo tenant's project, or of what the fields say."""
    if "project_id" not in fields:
        _, _, answer = await gateway.request("GET", "/admin/v1/projects", key=gateway.admin_key)
        fields["project_id"] = json.loads(answer)["data"][0]["id"]
    made = json.dumps({"name": "k", **fields}).encode()
    _, _, answer = await gateway.request("POST", "/admin/v1/keys", made, gateway.admin_key)
    return json.loads(answer)["secret"]


async def drop_table(gateway: RunningGateway) -> None:
    """As before the migration, or with the store away: whatever reads or writes responses fails."""
    async with gateway.database.write() as session:
        await session.execute(text("DROP TABLE responses"))


async def test_a_response_is_kept_only_where_the_request_says_so_and_else_costs_no_statement(
    gateway: RunningGateway,
) -> None:
    said = []
    event.listen(gateway.database.engine.sync_engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    for store in (None, False):
        response = await gateway.client.responses.create(**BODY, store=store)
        assert response.store is False
        with pytest.raises(openai.NotFoundError, match="only responses that were created with 'store': true"):
            await gateway.client.responses.retrieve(response.id)
    assert await num_kept(gateway) == 0
    said.clear()
    await gateway.client.responses.create(**BODY)
    assert [statement for statement in said if "responses" in statement] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_response_is_found_again_as_it_was_answered(gateway: RunningGateway, stream: bool) -> None:
    asked: dict[str, Any] = {**BODY, "store": True, "metadata": {"order": "7"}, "stream": stream}
    if stream:
        response = [event async for event in await gateway.client.responses.create(**asked)][-1].response
    else:
        response = await gateway.client.responses.create(**asked)
    assert (response.store, response.output_text) == (True, "1 2 3")
    assert await gateway.client.responses.retrieve(response.id) == response
    with pytest.raises(openai.BadRequestError, match="can be streamed again"):
        await gateway.client.responses.retrieve(response.id, stream=True)


async def test_a_conversation_is_continued_without_its_instructions(gateway: RunningGateway) -> None:
    first = await keep(gateway, instructions="be brief")
    second = await keep(gateway, input="and?", previous_response_id=first.id, instructions="be long")
    assert second.previous_response_id == first.id
    turns = "<|user|>hello\n<|assistant|>1 2 3\n<|user|>and?\n"
    assert last_prompt(gateway) == f"<|system|>be long\n{turns}<|assistant|>"
    third = await gateway.client.responses.create(**BODY, previous_response_id=second.id)
    assert last_prompt(gateway) == f"{turns}<|assistant|>1 2 3\n<|user|>hello\n<|assistant|>"
    with pytest.raises(openai.NotFoundError) as caught:
        await gateway.client.responses.create(**BODY, previous_response_id=third.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_conversation_may_branch(gateway: RunningGateway) -> None:
    first = await keep(gateway)
    await keep(gateway, input="left", previous_response_id=first.id)
    right = await keep(gateway, input="right", previous_response_id=first.id)
    await keep(gateway, input="on", previous_response_id=right.id)
    turns = "<|user|>hello\n<|assistant|>1 2 3\n<|user|>right\n<|assistant|>1 2 3\n<|user|>on\n"
    assert last_prompt(gateway) == f"{turns}<|assistant|>"


async def test_the_items_of_a_response_are_listed_from_either_end_page_by_page(gateway: RunningGateway) -> None:
    first = await keep(gateway, input=[{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}])
    second = await keep(gateway, input="and?", previous_response_id=first.id)
    listed = [item async for item in gateway.client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [(item.role, item.content[0].text) for item in listed] == [
        ("developer", "d"), ("user", "u"), ("assistant", "1 2 3"), ("user", "and?"),
    ]  # fmt: skip
    assert listed[2].id == first.output[0].id
    assert len({item.id for item in listed}) == 4
    newest = [item async for item in gateway.client.responses.input_items.list(second.id, limit=3)]
    assert newest == listed[::-1]
    for bad in ({"after": "msg_none"}, {"limit": 101}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            await gateway.client.responses.input_items.list(second.id, **bad)


async def test_a_deleted_response_is_gone_and_what_it_carried_cannot_be_continued(gateway: RunningGateway) -> None:
    first = await keep(gateway)
    second = await keep(gateway, previous_response_id=first.id)
    await gateway.client.responses.delete(first.id)
    for call in (
        gateway.client.responses.retrieve(first.id),
        gateway.client.responses.delete(first.id),
        gateway.client.responses.cancel(first.id),
        gateway.client.responses.input_items.list(first.id),
        keep(gateway, previous_response_id=first.id),
        keep(gateway, previous_response_id=second.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert await gateway.client.responses.retrieve(second.id) == second
    assert [item.content[0].text async for item in gateway.client.responses.input_items.list(second.id)] == ["hello"]
    rows = await gateway.rows.wait_for(4)
    assert [row.http_status for row in rows] == [200, 200, 404, 404]
    assert len(gateway.engine.submits) == 2


async def test_nothing_that_is_kept_can_be_cancelled(gateway: RunningGateway) -> None:
    response = await keep(gateway)
    with pytest.raises(openai.BadRequestError, match="made in the background") as caught:
        await gateway.client.responses.cancel(response.id)
    assert caught.value.code == "response_not_cancellable"


async def test_a_key_for_other_models_does_not_find_it(gateway: RunningGateway) -> None:
    response = await keep(gateway)
    assert (await gateway.request("GET", f"{PATH}/{response.id}", key=await new_key(gateway)))[0] == 200
    limited = await new_key(gateway, allowed_models=["another"])
    for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        status, _, answer = await gateway.request(method, f"{PATH}/{response.id}{path}", key=limited)
        _, _, unknown = await gateway.request(method, f"{PATH}/{NEVER}{path}", key=limited)
        assert (status, answer.replace(response.id.encode(), NEVER.encode())) == (404, unknown)


async def test_a_response_expires_and_is_deleted_then(start_gateway: StartGateway, card: ModelCard) -> None:
    clock = DatabaseClock()
    async with start_gateway([FakeEngineClient(card)], now=clock.now, responses_ttl_s=60) as gateway:
        response = await keep(gateway)
        clock.ms += 59_000
        later = await keep(gateway, previous_response_id=response.id)
        clock.ms += 1_000
        for call in (gateway.client.responses.retrieve(response.id), keep(gateway, previous_response_id=later.id)):
            with pytest.raises(openai.NotFoundError):
                await call
        assert await num_kept(gateway) == 2
        async with gateway.database.write() as session:
            assert await ResponseStore(clock.now).purge(session) == 1
        assert await gateway.client.responses.retrieve(later.id) == later


async def test_while_the_store_is_away_only_what_needs_it_is_refused_and_before_it_is_served(
    gateway: RunningGateway,
) -> None:
    response = await keep(gateway)
    await drop_table(gateway)
    for fields in ({"store": True}, {"previous_response_id": response.id}):
        status, headers, answer = await gateway.post(PATH, BODY | fields)
        assert (status, headers["retry-after"]) == (503, "1"), answer
    assert len(gateway.engine.submits) == 1
    assert (await gateway.client.responses.create(**BODY)).output_text == "1 2 3"


async def test_responses_that_cannot_be_stored_are_returned_and_marked(
    start_gateway: StartGateway, card: ModelCard, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.3)]) as gateway:
        stream = await gateway.client.responses.create(**BODY | {"store": True, "max_output_tokens": 400}, stream=True)
        async for one in stream:
            if one.type == "response.created":
                assert one.response.store is True
                await drop_table(gateway)
                gateway.engine.token_s = 0.0  # the answer ends only now
        assert (one.type, one.response.store) == ("response.incomplete", False)
        assert "response_not_stored" in capsys.readouterr().out


async def test_a_tenant_has_so_much_kept_and_no_more(start_gateway: StartGateway, card: ModelCard) -> None:
    bounds: dict[str, Any] = {"responses_max_per_tenant": 2, "responses_max_bytes_per_tenant": 4000}
    async with start_gateway([FakeEngineClient(card)], **bounds) as gateway:
        kept = [await keep(gateway) for _ in range(2)]
        status, headers, answer = await gateway.post(PATH, BODY | {"store": True})
        error = json.loads(answer)["error"]
        assert (status, error["code"], headers["retry-after"]) == (429, "response_storage_full", "60")
        assert (await gateway.client.responses.create(**BODY)).store is False
        await gateway.client.responses.delete(kept[0].id)
        large = await keep(gateway, input="x" * 400, instructions="y" * 50)
        assert large.store is True
        await gateway.client.responses.delete(kept[1].id)
        await gateway.client.responses.delete(large.id)
        larger = await keep(gateway, include=["message.output_text.logprobs"], max_output_tokens=100)
        assert (larger.store, larger.usage.output_tokens) == (False, 100), "its logprobs have more bytes than there are"
        assert await num_kept(gateway) == 0


async def test_a_server_that_keeps_nothing_says_so(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], responses_max_per_tenant=0) as gateway:
        with pytest.raises(openai.BadRequestError, match="does not store responses") as caught:
            await keep(gateway)
        assert caught.value.param == "store"
        assert (await gateway.client.responses.create(**BODY)).store is False


async def test_a_conversation_that_is_too_long_is_not_continued(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], max_messages=3, max_body_bytes=2500) as gateway:
        first = await keep(gateway)
        second = await keep(gateway, previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError, match="has 4 items; one may have 3"):
            await keep(gateway, previous_response_id=second.id)
        large = await keep(gateway, include=["message.output_text.logprobs"], max_output_tokens=20)
        with pytest.raises(openai.APIStatusError, match="Begin a new one") as caught:
            await keep(gateway, previous_response_id=large.id)
        assert (caught.value.status_code, caught.value.param) == (413, "previous_response_id")


async def test_a_repeated_request_is_kept_once(gateway: RunningGateway) -> None:
    headers: dict[str, Any] = {"Idempotency-Key": "order-1"}
    first = await gateway.client.responses.create(**BODY, store=True, extra_headers=headers)
    again = await gateway.client.responses.create(**BODY, store=True, extra_headers=headers)
    assert (again, await num_kept(gateway)) == (first, 1)


async def test_cancelled_and_broken_responses_are_not_stored(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000))
    async with start_gateway([engine]) as gateway:
        asked: dict[str, Any] = {**BODY, "store": True, "max_output_tokens": 1_000_000, "stream": True}
        for number, break_off in enumerate((lambda posting: posting.cancel(), lambda _: engine.die()), 1):
            posting = asyncio.create_task(gateway.post(PATH, asked))
            await until(lambda: engine.state.num_inflight == 1 and engine.submits)
            break_off(posting)
            await gateway.rows.wait_for(number)
            await asyncio.wait([posting])
        assert await num_kept(gateway) == 0


async def test_text_is_not_logged(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> None:
    response = await keep(gateway, input="a secret wish", instructions="secretly")
    await keep(gateway, previous_response_id=response.id)
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
