"""OpenAI's conversations: created, listed, changed, and continued by responses, also by several at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import openai
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import Failed, FailureCode, ModelCard

from .conftest import DEADLINE_S, RunningGateway, StartGateway, ToolCard, always
from .test_background_responses import ended, endless  # noqa: F401  a fixture
from .test_response_tools import last_prompt

BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 3}
USER: dict[str, Any] = {"type": "message", "role": "user", "content": "hi"}


async def texts(gateway: RunningGateway, conversation_id: str) -> list[str]:
    listed = gateway.client.conversations.items.list(conversation_id, order="asc", limit=3)
    return [item.content[0].text async for item in listed]


async def test_a_conversation_is_created_listed_changed_and_deleted(gateway: RunningGateway) -> None:
    conversations = gateway.client.conversations
    made = await conversations.create(items=[USER], metadata={"topic": "demo"})
    assert (made.object, made.metadata, made.id[:5]) == ("conversation", {"topic": "demo"}, "conv_")
    assert await conversations.retrieve(made.id) == made
    assert (await conversations.update(made.id, metadata={"topic": "other"})).metadata == {"topic": "other"}
    more = [{**USER, "content": f"more {number}"} for number in range(4)]
    added = await conversations.items.create(made.id, items=more, include=["file_search_call.results"])
    assert [item.content[0].text for item in added.data] == ["more 0", "more 1", "more 2", "more 3"]
    assert await texts(gateway, made.id) == ["hi", "more 0", "more 1", "more 2", "more 3"]
    newest = await conversations.items.list(made.id, limit=2)
    assert ([item.id for item in newest.data], newest.has_more) == ([added.data[3].id, added.data[2].id], True)
    one = added.data[1]
    assert (await conversations.items.retrieve(one.id, conversation_id=made.id)).content[0].text == "more 1"
    assert (await conversations.items.delete(one.id, conversation_id=made.id)).id == made.id
    with pytest.raises(openai.NotFoundError, match="no item"):
        await conversations.items.retrieve(one.id, conversation_id=made.id)
    assert await texts(gateway, made.id) == ["hi", "more 0", "more 2", "more 3"]
    gone = await conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for call in (conversations.retrieve(made.id), conversations.items.list(made.id), conversations.delete(made.id)):
        with pytest.raises(openai.NotFoundError) as missing:
            await call
        assert missing.value.code == "conversation_not_found"


async def test_a_response_reads_a_conversation_and_adds_its_items_whether_it_is_stored_or_not(
    gateway: RunningGateway,
) -> None:
    made = await gateway.client.conversations.create(items=[USER])
    first = await gateway.client.responses.create(**BODY, conversation=made.id)
    assert (first.conversation.id, first.store) == (made.id, False)
    assert last_prompt(gateway) == "<|user|>hi\n<|user|>hello\n<|assistant|>"
    second = await gateway.client.responses.create(**BODY, conversation={"id": made.id}, store=True)
    assert last_prompt(gateway) == "<|user|>hi\n<|user|>hello\n<|assistant|>1 2 3\n<|user|>hello\n<|assistant|>"
    assert await texts(gateway, made.id) == ["hi", "hello", "1 2 3", "hello", "1 2 3"]
    events = [event async for event in await gateway.client.responses.create(**BODY, conversation=made.id, stream=True)]
    assert events[-1].response.conversation.id == made.id
    assert len(await texts(gateway, made.id)) == 7
    branch = await gateway.client.responses.create(**BODY, previous_response_id=second.id)
    assert branch.conversation is None
    assert last_prompt(gateway).count("hello") == 3  # what the second response has read, and not what came later
    listed = await gateway.client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in listed.data] == ["hi", "hello", "1 2 3", "hello"]
    count = await gateway.client.responses.input_tokens.count(model="tiny", input="hello", conversation=made.id)
    assert count.input_tokens > first.usage.input_tokens
    await gateway.client.conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError) as lost:
        await gateway.client.responses.create(**BODY, previous_response_id=second.id)
    assert lost.value.code == "previous_response_not_found"


@pytest.mark.parametrize("how", [{"stream": True}, {"background": True}])
async def test_a_second_response_in_a_conversation_is_refused_until_the_first_has_ended(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
    how: dict[str, Any],
) -> None:
    async with start_gateway([endless], credit_window_tokens=8) as gateway:
        create, made = gateway.client.responses.create, await gateway.client.conversations.create()
        first = await create(**BODY | {"max_output_tokens": 10**6}, conversation=made.id, **how)
        if "stream" in how:
            await anext(aiter(first))
        for more in ({}, {"stream": True}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="another response is being made") as locked:
                await create(**BODY, conversation=made.id, **more)
            assert (locked.value.code, locked.value.param) == ("conversation_locked", "conversation")
        await gateway.client.conversations.items.create(made.id, items=[USER])
        assert (await create(**BODY, conversation=(await gateway.client.conversations.create()).id)).output
        if "stream" in how:
            await first.close()
            await gateway.rows.wait_for(2)
        else:
            await gateway.client.responses.cancel(first.id)
        async with asyncio.timeout(DEADLINE_S):
            while True:  # the gateway learns that the client has left
                with contextlib.suppress(openai.BadRequestError):
                    assert (await create(**BODY, conversation=made.id)).conversation.id == made.id
                    break
        assert (await texts(gateway, made.id))[:-1] == ["hi", "hello"]  # and the last answer


async def test_a_failed_request_unlocks_its_conversation_before_its_error_is_sent(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        create, made = gateway.client.responses.create, await gateway.client.conversations.create()
        failing, answering = always(Failed("", 0, FailureCode.ENGINE_FAILED, "no, because", 0)), engine.script
        streams: tuple[Any, ...] = (False, True)
        for stream in streams:
            engine.script = failing
            with pytest.raises(openai.APIError, match="no, because"):
                answer = await create(**BODY, conversation=made.id, stream=stream)
                assert [event async for event in answer] == []
            engine.script = answering
            await create(**BODY, conversation=made.id)
        with pytest.raises(openai.NotFoundError):
            await create(**BODY | {"model": "none"}, conversation=made.id)
        await asyncio.gather(*(create(**BODY, conversation=made.id) for _ in range(6)), return_exceptions=True)
        found = await texts(gateway, made.id)
        assert len(found) >= 6 and found == ["hello", "1 2 3"] * (len(found) // 2)


async def test_a_background_response_adds_its_items_when_it_ends_and_a_failed_one_none(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        made = await gateway.client.conversations.create()
        queued = await gateway.client.responses.create(**BODY, conversation=made.id, background=True)
        assert (await ended(gateway, queued.id)).conversation.id == made.id
        assert await texts(gateway, made.id) == ["hello", "1 2 3"]
        engine.script = always(Failed("", 0, FailureCode.ENGINE_FAILED, "no, because", 0))
        queued = await gateway.client.responses.create(**BODY, conversation=made.id, background=True)
        assert (await ended(gateway, queued.id)).status == "failed"
        assert len(await texts(gateway, made.id)) == 2


async def test_bad_references_to_conversations_are_refused(gateway: RunningGateway) -> None:
    made = await gateway.client.conversations.create()
    cases: tuple[tuple[dict[str, Any], int, str], ...] = (
        ({"conversation": "conv_none"}, 404, "no conversation"),
        ({"conversation": made.id, "previous_response_id": "resp_1"}, 400, "exclude each other"),
        ({"conversation": 7}, 400, "conversation"),
        ({"conversation": {}}, 400, "conversation"),
    )
    for changes, status, message in cases:
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            await gateway.client.responses.create(**BODY, **changes)
        assert refused.value.status_code == status
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
        path = f"/v1/conversations/{made.id}/items"
        assert (await client.post(path, json={"items": []})).status_code == 400
        unknown = await client.post(path, json={"items": [{"type": "item_reference", "id": "msg_1"}]})
        assert unknown.status_code == 404
        skipped = await client.post(path, json={"items": [USER, {"type": "web_search_call"}]})
        assert skipped.headers["x-moiety-ignored-fields"] == "items.web_search_call"
        assert (await client.post(f"/v1/conversations/{made.id}", json={})).status_code == 400


async def test_a_conversation_that_is_deleted_during_the_answer_is_not_made_again(
    start_gateway: StartGateway,
    endless: FakeEngineClient,  # noqa: F811
) -> None:
    async with start_gateway([endless], credit_window_tokens=8) as gateway:
        made = await gateway.client.conversations.create()
        asked = BODY | {"max_output_tokens": 5_000, "conversation": made.id, "store": True}
        is_deleted = False
        async for event in await gateway.client.responses.create(**asked, stream=True):
            if event.type == "response.output_text.delta" and not is_deleted:
                await gateway.client.conversations.delete(made.id)
                is_deleted = True
        assert (event.response.conversation, event.response.store) == (None, False)


async def test_limits_of_a_conversation_hold(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], max_messages=4, responses_max_per_tenant=2) as gateway:
        made = await gateway.client.conversations.create(items=[USER] * 3)
        with pytest.raises(openai.BadRequestError, match="5 items"):
            await gateway.client.conversations.items.create(made.id, items=[USER] * 2)
        assert len(await texts(gateway, made.id)) == 3  # nothing of it was added
        await gateway.client.conversations.items.create(made.id, items=[USER])
        with pytest.raises(openai.BadRequestError, match="Begin a new one"):
            await gateway.client.responses.create(**BODY, conversation=made.id)
        await gateway.client.conversations.create()
        with pytest.raises(openai.RateLimitError) as full:
            await gateway.client.conversations.create()
        assert full.value.code == "response_storage_full"


FOUND = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
SEARCH = {"type": "tool_search", "execution": "client"}


@pytest.mark.parametrize("how", ["previous_response_id", "conversation"])
async def test_tools_that_a_search_has_found_are_offered_in_later_turns(
    start_gateway: StartGateway, tool_card: ToolCard, how: str
) -> None:
    async with start_gateway([FakeEngineClient(tool_card("hermes"))]) as gateway:
        call = {"type": "tool_search_call", "call_id": "c1", "arguments": {}, "execution": "client"}
        result = {"type": "tool_search_output", "call_id": "c1", "tools": [FOUND], "execution": "client"}
        plain = BODY | {"model": "hermes"}
        body = plain | {"input": [USER, call, result], "tools": [SEARCH]}
        made = await gateway.client.conversations.create()
        on = {"conversation": made.id} if how == "conversation" else {"store": True}
        first = await gateway.client.responses.create(**body, **on)
        later = {how: made.id if how == "conversation" else first.id}
        await gateway.client.responses.create(**plain, **later)
        assert '"name": "add"' in last_prompt(gateway)
        await gateway.client.responses.create(**plain, **later, tool_choice={"type": "function", "name": "add"})
        with pytest.raises(openai.BadRequestError, match="none of the tools has the name 'sub'"):
            await gateway.client.responses.create(**plain, **later, tool_choice={"type": "function", "name": "sub"})
