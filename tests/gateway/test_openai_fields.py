"""Fields of OpenAI's and vLLM's chats and completions with the real `openai` package: served, mapped or ignored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import ModelCard, Submit

from .conftest import RunningGateway, StartGateway, ToolCard

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FORECAST: Any = {"name": "forecast", "parameters": SCHEMA}
PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Apply a patch.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "*** Begin"'}},
    },
}
BODIES = {"/v1/chat/completions": {"messages": HELLO}, "/v1/completions": {"prompt": "hello"}}


def says(text: str) -> Any:
    return lambda submit: [(65, character) for character in text]


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def prompt_of(submit: Submit, card: ModelCard) -> str:
    return Tokenizer.from_json(card.tokenizer_json).decode(submit.prompt_ids, skip_special_tokens=False)


async def streamed(gateway: RunningGateway, **asked: Any) -> list[Any]:
    """Return the chunks of a streamed chat, as dictionaries with the fields that were sent."""
    stream = await gateway.client.chat.completions.create(stream=True, **asked)
    return [chunk.model_dump(exclude_unset=True) async for chunk in stream]


def deltas(chunks: list[Any], field: str) -> list[Any]:
    found = [choice["delta"].get(field) for chunk in chunks for choice in chunk["choices"]]
    return [one for one in found if one is not None]


# ── tools ──


async def test_requests_with_functions_get_function_calls_whole_and_streamed(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("hermes")
    engine = FakeEngineClient(card, says(call("forecast", {"city": "Zürich"})))
    asked: dict[str, Any] = {"model": "hermes", "messages": HELLO, "functions": [FORECAST]}
    async with start_gateway([engine]) as gateway:
        for choice in ("auto", None):
            more = {} if choice is None else {"function_call": choice}
            (answer,) = (await gateway.client.chat.completions.create(**asked, **more)).choices
            assert answer.finish_reason == "function_call"
            assert answer.message.function_call.to_dict() == {"name": "forecast", "arguments": '{"city": "Zürich"}'}
            assert (answer.message.tool_calls, answer.message.content) == (None, None)
        chunks = await streamed(gateway, **asked)
        calls = deltas(chunks, "function_call")
        assert calls[0] == {"name": "forecast", "arguments": ""}
        assert "".join(part["arguments"] for part in calls) == '{"city": "Zürich"}'
        assert deltas(chunks, "tool_calls") == []
        assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
        await gateway.client.chat.completions.create(**asked, function_call="none")
        assert "forecast" not in prompt_of(engine.submits[-1], card)
        engine.script = says('{"city": "Bern"}}\n</tool_call>')
        forced = await gateway.client.chat.completions.create(**asked, function_call={"name": "forecast"})
        assert forced.choices[0].message.function_call.arguments == '{"city": "Bern"}'


async def test_function_calls_and_results_become_those_of_the_template(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("hermes")
    engine = FakeEngineClient(card, says("ok"))
    messages: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": "forecast", "arguments": '{"city": "Bern"}'}},
        {"role": "function", "name": "forecast", "content": "warm"},
        {"role": "function", "name": "other", "content": None},
    ]
    async with start_gateway([engine]) as gateway:
        await gateway.client.chat.completions.create(model="hermes", messages=messages, functions=[FORECAST])
    prompt = prompt_of(engine.submits[0], card)
    assert '"name": "forecast", "arguments": {"city": "Bern"}' in prompt
    assert "<|tool|>warm (forecast)" in prompt and "<|tool|> (other)" in prompt


async def test_custom_tools_are_called_with_text_whole_and_streamed(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card, patch = tool_card("hermes"), '*** Begin\n"ü"\n'
    text = call("apply_patch", {"input": patch}) + "\n" + call("forecast", {"city": "Bern"})
    engine = FakeEngineClient(card, says(text))
    tools: list[Any] = [PATCH, {"type": "function", "function": FORECAST}]
    asked: dict[str, Any] = {"model": "hermes", "messages": HELLO, "tools": tools}
    async with start_gateway([engine]) as gateway:
        (answer,) = (await gateway.client.chat.completions.create(**asked)).choices
        calls: Any = answer.message.tool_calls
        first, second = calls
        assert (first.type, first.custom.name, first.custom.input) == ("custom", "apply_patch", patch)
        assert (second.type, second.function.name) == ("function", "forecast")
        assert answer.finish_reason == "tool_calls"
        parts = [part for delta in deltas(await streamed(gateway, **asked), "tool_calls") for part in delta]
        custom = [part for part in parts if part["index"] == 0]
        assert (custom[0]["type"], custom[0]["custom"]) == ("custom", {"name": "apply_patch", "input": ""})
        assert "".join(part["custom"]["input"] for part in custom) == patch
        assert all("function" in part and "custom" not in part for part in parts if part["index"] == 1)
        again = [*HELLO, answer.message.to_dict(), *({"role": "tool", "tool_call_id": one.id, "content": "done"}
                                                     for one in (first, second))]  # fmt: skip
        await gateway.client.chat.completions.create(**{**asked, "messages": again})
    assert "The input must match this Lark grammar:\\nstart: " in prompt_of(engine.submits[0], card)
    assert f'"arguments": {{"input": {json.dumps(patch)}}}' in prompt_of(engine.submits[-1], card).replace(
        "ü", "\\u00fc"
    )


async def test_a_custom_tool_can_be_required(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    engine = FakeEngineClient(tool_card("hermes"), says('{"input": "x"}}\n</tool_call>'))
    choice: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
    async with start_gateway([engine]) as gateway:
        answer = await gateway.client.chat.completions.create(
            model="hermes",
            messages=HELLO,
            tools=[PATCH, {"type": "function", "function": FORECAST}],
            tool_choice=choice,
        )
    calls: Any = answer.choices[0].message.tool_calls
    (made,) = calls
    assert (made.type, made.custom.name, made.custom.input) == ("custom", "apply_patch", "x")


async def test_only_allowed_tools_are_offered(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    card = tool_card("hermes")
    engine = FakeEngineClient(card, says("ok"))
    tools: list[Any] = [PATCH, {"type": "function", "function": FORECAST}]
    chosen: list[Any] = [{"type": "function", "function": {"name": "forecast"}}, {"type": "web_search"}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": chosen}}
    async with start_gateway([engine]) as gateway:
        await gateway.client.chat.completions.create(model="hermes", messages=HELLO, tools=tools, tool_choice=choice)
        choice["allowed_tools"]["mode"] = "required"
        await gateway.client.chat.completions.create(model="hermes", messages=HELLO, tools=tools, tool_choice=choice)
    for submit in engine.submits:
        prompt = prompt_of(submit, card)
        assert '"forecast"' in prompt and "apply_patch" not in prompt
    assert prompt_of(engine.submits[1], card).endswith('{"name": "forecast", "arguments":')


async def test_tools_of_unknown_types_are_skipped_and_named_in_the_answers_header(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("hermes")
    engine = FakeEngineClient(card, says("ok"))
    tools: list[Any] = [{"type": "web_search"}, {"type": "function", "function": FORECAST}, {"type": "mcp", "x": {}}]
    async with start_gateway([engine]) as gateway:
        for offered, header in ((tools, "tools.0, tools.2"), (tools[:1], "tools.0"), (tools[1:2], None)):
            answer = await gateway.client.chat.completions.with_raw_response.create(
                model="hermes", messages=HELLO, tools=offered
            )
            assert answer.headers.get("x-moiety-ignored-fields") == header
            assert ('"forecast"' in prompt_of(engine.submits[-1], card)) == (len(offered) != 1 or header is None)


@pytest.mark.parametrize("name", ["weather.now", "mcp/github:issues", "a" * 128])
async def test_tool_names_may_have_dots_slashes_and_colons(
    start_gateway: StartGateway, tool_card: ToolCard, name: str
) -> None:
    engine = FakeEngineClient(tool_card("hermes"), says(call(name, {})))
    tools: list[Any] = [{"type": "function", "function": {"name": name}}]
    async with start_gateway([engine]) as gateway:
        answer = await gateway.client.chat.completions.create(model="hermes", messages=HELLO, tools=tools)
    assert answer.choices[0].message.tool_calls[0].function.name == name


# ── messages ──


async def test_results_without_content_refusals_and_their_parts_are_text(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("hermes")
    engine = FakeEngineClient(card, says("ok"))
    made: Any = {"id": "c", "type": "function", "function": {"name": "forecast", "arguments": ""}}
    messages: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "assistant", "refusal": "I cannot."},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
    ]
    async with start_gateway([engine]) as gateway:
        await gateway.client.chat.completions.create(model="hermes", messages=messages)
        tokenized = await gateway.post("/tokenize", {"model": "hermes", "messages": messages})
    prompt = prompt_of(engine.submits[0], card)
    assert "<|tool|> (forecast)<|assistant|>I cannot.<|assistant|>a\nb<|assistant|>" in prompt
    assert json.loads(tokenized[2])["count"] == len(engine.submits[0].prompt_ids)


# ── streams ──


async def test_every_chunk_has_the_usage_so_far_if_the_client_asks_for_it(gateway: RunningGateway) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "stream": True, "stream_options": options, "n": 2}
    for create, prompt in (
        (gateway.client.chat.completions.create, {"messages": HELLO}),
        (gateway.client.completions.create, {"prompt": "hello"}),
    ):
        chunks = [chunk async for chunk in await create(**asked, **prompt)]
        assert chunks[-1].usage.completion_tokens == 8 and chunks[-1].choices == []
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
        for index in (0, 1):
            counts = [chunk.usage.completion_tokens for chunk in chunks[:-1] if chunk.choices[0].index == index]
            assert counts == sorted(counts) and counts[-1] == 4 and len(set(counts)) >= 4


async def test_usage_so_far_is_sent_only_with_include_usage(gateway: RunningGateway) -> None:
    options: Any = {"continuous_usage_stats": True}
    chunks = await streamed(gateway, model="tiny", messages=HELLO, max_tokens=2, stream_options=options)
    assert chunks and all("usage" not in chunk for chunk in chunks)


# ── ignored and mapped ──


@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_fields_are_named_in_the_answers_header(gateway: RunningGateway, stream: bool) -> None:
    ignored: dict[str, Any] = {
        "store": True,
        "verbosity": "low",
        "prediction": {"type": "content", "content": "1 2 3"},
        "web_search_options": {"search_context_size": "low"},
        "prompt_cache_key": "k",
        "priority": 3,
        "request_id": "mine",
        "prompt_cache_options": {"mode": "explicit"},
    }
    served: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "modalities": ["text"],
        "audio": None,
        "moderation": None,
        "use_beam_search": False,
        "skip_special_tokens": True,
        "reasoning_effort": "max",
    }
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, "stream": stream, **ignored, **served}
    status, headers, answer = await gateway.post("/v1/chat/completions", body)
    assert status == 200, answer
    named = headers["x-moiety-ignored-fields"].split(", ")
    assert named == sorted({*ignored, "prompt_cache_options.mode"} - {"prompt_cache_options"})


async def test_service_tiers_that_are_not_offered_mean_the_nearest(gateway: RunningGateway) -> None:
    for tier, served in (("fast", "priority"), ("scale", "auto")):
        bodies = [{"model": "tiny", "max_tokens": 1, "service_tier": one, "messages": HELLO} for one in (tier, served)]
        answers = [await gateway.post("/v1/chat/completions", body) for body in bodies]
        assert [status for status, _, _ in answers] == [200, 200], answers
        assert len({json.loads(answer)["service_tier"] for _, _, answer in answers}) == 1


async def test_a_lifetime_of_the_prompt_cache_is_kept_to(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    for more, keep_s in (
        ({}, 0.0),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 86_400.0),
        ({"prompt_cache_options": {}}, 0.0),
    ):
        await gateway.client.chat.completions.create(**asked, extra_body=more)
        assert gateway.engine.submits[-1].keep_s == keep_s


# ── vLLM's ──


async def test_a_salt_of_the_clients_separates_its_prefix_cache(gateway: RunningGateway) -> None:
    for path, prompt in BODIES.items():
        for salt in (None, "a", "b", "a"):
            body = {"model": "tiny", "max_tokens": 1, "cache_salt": salt, **prompt}
            assert (await gateway.post(path, body))[0] == 200
    salts = [submit.cache_salt for submit in gateway.engine.submits]
    assert salts[:4] == salts[4:]
    assert salts[1] == salts[3] and len(set(salts)) == 3


async def test_an_answer_continues_the_final_message(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    card = tool_card("hermes")
    engine = FakeEngineClient(card, says(" world"))
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "Hello"}]
    async with start_gateway([engine]) as gateway:
        for more in ({}, {"add_generation_prompt": False}):
            answer = await gateway.client.chat.completions.create(
                model="hermes", messages=messages, extra_body={"continue_final_message": True, **more}
            )
            assert answer.choices[0].message.content == " world"
    assert all(prompt_of(submit, card).endswith("hello<|assistant|>Hello") for submit in engine.submits)


async def test_documents_reach_a_template_that_reads_them(start_gateway: StartGateway, card: ModelCard) -> None:
    reading = msgspec.structs.replace(
        card, chat_template="{% for one in documents or [] %}[{{ one.text }}]{% endfor %}" + card.chat_template
    )
    documents = [{"title": "t", "text": "first"}, {"text": "second"}]
    engine, other = FakeEngineClient(reading), FakeEngineClient(msgspec.structs.replace(card, engine_id="o", model="o"))
    async with start_gateway([engine, other]) as gateway:
        body = {"messages": HELLO, "max_tokens": 1, "documents": documents}
        assert (await gateway.post("/v1/chat/completions", {"model": "tiny", **body}))[0] == 200
        status, _, answer = await gateway.post("/v1/chat/completions", {"model": "o", **body})
        assert (status, b"no variable 'documents'" in answer) == (400, True)
    assert prompt_of(engine.submits[0], reading).startswith("[first][second]<|user|>")


@pytest.mark.parametrize("shows", [True, False])
async def test_reasoning_can_be_left_out_of_an_answer(
    start_gateway: StartGateway, thinking_card: ModelCard, shows: bool
) -> None:
    engine = FakeEngineClient(thinking_card, says("<think>Hm.</think>Well."))
    asked: dict[str, Any] = {"model": "hermes", "messages": HELLO, "extra_body": {"include_reasoning": shows}}
    async with start_gateway([engine]) as gateway:
        message = (await gateway.client.chat.completions.create(**asked)).choices[0].message.to_dict()
        chunks = await streamed(gateway, **asked)
    assert (message["content"], message.get("reasoning_content")) == ("Well.", "Hm." if shows else None)
    assert message.get("reasoning") == message.get("reasoning_content")
    assert "".join(deltas(chunks, "content")) == "Well."
    assert "".join(deltas(chunks, "reasoning_content")) == ("Hm." if shows else "")
    assert deltas(chunks, "reasoning") == deltas(chunks, "reasoning_content")


async def test_a_schema_beside_a_name_is_followed(gateway: RunningGateway) -> None:
    """Clients that know both forms send a name in one and the schema in the other; no schema is any JSON object."""
    for response_format in (
        {"type": "json_schema", "json_schema": {"name": "any", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "any"}, "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"name": "any", "schema": SCHEMA}},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "any"}},
    ):
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, "response_format": response_format}
        await gateway.post("/v1/chat/completions", body)
    named, beside, *without = [submit.grammar for submit in gateway.engine.submits]
    assert named == beside != without[0] is not None
    assert without == [without[0]] * 3


@pytest.mark.parametrize("path", BODIES)
async def test_token_ids_are_returned_whole_and_streamed(gateway: RunningGateway, path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "n": 2, "max_tokens": 4, "return_token_ids": True, **BODIES[path]}
    answer = json.loads((await gateway.post(path, body))[2])
    prompt_ids = list(gateway.engine.submits[0].prompt_ids)
    assert all(len(choice["token_ids"]) == 4 for choice in answer["choices"])
    within = [answer] if "chat" in path else answer["choices"]
    assert [one["prompt_token_ids"] for one in within] == [prompt_ids] * len(within)
    options = {"include_usage": True, "continuous_usage_stats": True}
    for more in ({}, {"stream_options": options}):
        events = (await gateway.post(path, {**body, "stream": True, **more}))[2].decode().split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        ids: list[list[int]] = [[], []]
        prompts = []
        for chunk in chunks:
            prompts += [chunk["prompt_token_ids"]] if "prompt_token_ids" in chunk else []
            for choice in chunk["choices"]:
                ids[choice["index"]] += choice["token_ids"]
                prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
        assert ids == [choice["token_ids"] for choice in answer["choices"]]
        assert prompts == [prompt_ids] * 2
        assert all("usage" in chunk for chunk in chunks) == bool(more)


async def test_ids_are_streamed_beside_a_call(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    engine = FakeEngineClient(tool_card("hermes"), says(text := "Well. " + call("forecast", {"city": "Bern"})))
    tools: list[Any] = [{"type": "function", "function": FORECAST}]
    async with start_gateway([engine]) as gateway:
        chunks = await streamed(
            gateway, model="hermes", messages=HELLO, tools=tools, extra_body={"return_token_ids": True}
        )
    ids = [token_id for chunk in chunks for choice in chunk["choices"] for token_id in choice["token_ids"]]
    assert ids == [65] * len(text)
    assert deltas(chunks, "tool_calls")


async def test_logprobs_name_tokens_by_id_if_requested(gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "extra_body": {"return_tokens_as_token_ids": True}}
    chat = {**asked, "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    content = (await gateway.client.chat.completions.create(**chat)).choices[0].logprobs.content
    names = [entry.token for entry in content]
    assert names and all(name.startswith("token_id:") for name in names)
    assert [entry.top_logprobs[0].token for entry in content] == names
    assert [bytes(entry.bytes) for entry in content] == [b"1", b" 2"]
    found = [
        entry["token"]
        for chunk in await streamed(gateway, **chat)
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert found == names
    completion = {**asked, "prompt": "ab", "logprobs": 1}
    logprobs = (await gateway.client.completions.create(**completion)).choices[0].logprobs
    assert (logprobs.tokens, logprobs.text_offset) == (names, [0, 1])
    assert [list(top) for top in logprobs.top_logprobs] == [[name] for name in names]
    echoed = (await gateway.client.completions.create(**completion, echo=True)).choices[0].logprobs
    prompt_ids = gateway.engine.submits[-1].prompt_ids
    assert echoed.tokens[: len(prompt_ids)][0] == f"token_id:{prompt_ids[0]}"
    assert all(name.startswith("token_id:") for name in echoed.tokens)


@pytest.mark.parametrize("path", BODIES)
async def test_special_tokens_are_in_the_text_if_requested(
    start_gateway: StartGateway, tool_card: ToolCard, path: str
) -> None:
    card = tool_card("hermes", special=["<|mark|>"], added=["<|plain|>"])
    special = tuple(
        one for one, token in Tokenizer.from_json(card.tokenizer_json).added_tokens.items() if token.special
    )
    engine = FakeEngineClient(card, says("ok"))
    async with start_gateway([engine]) as gateway:
        for skips in (False, True, None):
            body = {"model": "hermes", "max_tokens": 1, "skip_special_tokens": skips, **BODIES[path]}
            assert (await gateway.post(path, body))[0] == 200
    assert len(special) == 2
    assert [submit.shown_ids for submit in engine.submits] == [special, (), ()]


async def test_the_same_salt_of_two_tenants_is_not_the_same(gateway: RunningGateway) -> None:
    made: dict[str, Any] = {}
    for path, body in (("tenants", {"name": "other"}), ("projects", {"name": "p"}), ("keys", {"name": "k"})):
        status, _, answer = await gateway.post(f"/admin/v1/{path}", {**made, **body}, key=gateway.admin_key)
        assert status == 201, answer
        made = {"tenant_id" if path == "tenants" else "project_id": json.loads(answer).get("id")}
    for key in (gateway.key, json.loads(answer)["secret"]):
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 1, "cache_salt": "a"}
        assert (await gateway.post("/v1/chat/completions", body, key=key))[0] == 200
    first, second = (submit.cache_salt for submit in gateway.engine.submits)
    assert first != second
