"""Requests to external engines through the gateway: parameters, response formats, tools, and quotas.

The real `openai` client sends the requests."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartOver, ToolCard
from .external_server import ASK, MODEL, WHOLE, ClientOf, StartServer, client_of, folder, start_server, text_of

__all__ = ["client_of", "folder", "start_server"]  # fixtures


@pytest.mark.parametrize(
    ("kind", "more", "cached"),
    [("vllm", "", 7), ("sglang", "", 7), ("llama.cpp", "", 5), ("generic", "&context=512", 0)],
)
async def test_chats_and_completions_are_answered_and_billed_as_the_server_counts(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, kind: str, more: str, cached: int
) -> None:
    server = await start_server(kind)
    server.stop_at = 23
    async with start_over(client_of(server, more)) as gateway:
        whole = await gateway.client.chat.completions.create(**ASK)
        stream = await gateway.client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        raw = await gateway.client.completions.create(model=MODEL, prompt="count: ", max_tokens=10)
        assert whole.choices[0].message.content == WHOLE[:23]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == WHOLE[:23]
        assert raw.choices[0].text == WHOLE[:10]
        assert [whole.choices[0].finish_reason, raw.choices[0].finish_reason] == ["stop", "length"]
        for answer, row, counted in zip(
            (whole, chunks[-1], raw), await gateway.rows.wait_for(3), server.usages, strict=True
        ):
            assert answer.usage.prompt_tokens == row.prompt_tokens == counted["prompt_tokens"]
            assert answer.usage.completion_tokens == row.output_tokens == counted["completion_tokens"]
            assert row.cached_tokens == cached
        assert whole.usage.completion_tokens == 24  # with the token that ends
        assert whole.usage.prompt_tokens == gateway.prompt_tokens("hello")
        assert server.headers[0]["path"] == ("/completion" if kind == "llama.cpp" else "/v1/completions")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"), [("vllm", ""), ("sglang", ""), ("llama.cpp", ""), ("generic", "&context=512")]
)
async def test_stop_strings_apply_only_after_reasoning(
    start_server: StartServer,
    client_of: ClientOf,
    start_over: StartOver,
    folder: Path,
    card: ModelCard,
    kind: str,
    more: str,
    stream: bool,
) -> None:
    opens = card.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    (folder / "chat_template.jinja").write_text(opens)
    server = await start_server(kind)
    server.text = "Hm.\n\nSo.</think>\n\nYes.\n\nMore."
    async with start_over(client_of(server, more)) as gateway:
        answer = await gateway.client.chat.completions.create(**ASK, stop=["\n\n"], stream=stream)
        if stream:
            content: str | None = await text_of(answer)
        else:
            content = answer.choices[0].message.content
            assert answer.choices[0].message.reasoning_content == "Hm.\n\nSo."
        assert content == "Yes."
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, not server.bodies[0].get("stop")) == ("stop", True)
        raw = await gateway.client.completions.create(model=MODEL, prompt="a", max_tokens=40, stop=["\n\n"])
        assert raw.choices[0].text == "Hm."


async def test_tenant_and_class_sent_to_the_server_are_the_gateways_and_not_the_clients(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    async with start_over(client_of(server, "&priority=on", "a key of theirs")) as gateway:
        claims: dict[str, Any] = {"cache_salt": "mine", "priority": -100}
        await gateway.client.chat.completions.create(**ASK, service_tier="flex", extra_body=claims)
        await gateway.client.chat.completions.create(**ASK)
        await gateway.client.chat.completions.create(**ASK)
        flex, standard, again = server.bodies
        assert flex["cache_salt"] not in ("mine", standard["cache_salt"])  # the client's separates within the tenant's
        assert standard["cache_salt"] == again["cache_salt"]
        assert all(len(base64.urlsafe_b64decode(body["cache_salt"])) >= 16 for body in server.bodies)
        assert flex["priority"] > standard["priority"] >= 0
        assert flex["prompt"] == list(b"<|user|>hello\n<|assistant|>") or len(flex["prompt"]) == gateway.prompt_tokens(
            "hello"
        )
        assert server.headers[0]["authorization"] == "Bearer a key of theirs"
        assert gateway.key not in json.dumps([server.headers, server.bodies])


async def test_sampling_parameters_are_passed_on(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server, native = await start_server(), await start_server("llama.cpp")
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "seed": 11,
    }
    more: dict[str, Any] = {"top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5, "ignore_eos": True}
    bias: dict[str, Any] = {"logit_bias": {"65": -1.5}, "stop": ["nothing"]}
    vllm_only: dict[str, Any] = {
        "min_tokens": 3,
        "stop_token_ids": [12],
        "allowed_token_ids": [65, 66],
        "bad_words": ["AB"],
        "include_stop_str_in_output": True,
    }
    async with start_over(client_of(server)) as gateway:
        await gateway.client.chat.completions.create(**ASK, **asked, **bias, extra_body=more | vllm_only)
        (body,) = server.bodies
        expected = asked | more | bias | vllm_only | {"stop": ["nothing"], "max_tokens": 40, "stream": True}
        assert {name: body[name] for name in expected} == expected
        assert "priority" not in body
        await gateway.client.chat.completions.create(**ASK, top_p=0)
        assert (server.bodies[-1]["temperature"], server.bodies[-1]["top_p"]) == (0, 1)
    async with start_over(client_of(native)) as gateway:
        await gateway.client.chat.completions.create(**ASK, **asked, **bias, extra_body=more)
        (body,) = native.bodies
        assert (body["repeat_penalty"], body["n_predict"], body["logit_bias"]) == (1.5, 40, [[65, -1.5]])
        assert all(body[name] == value for name, value in asked.items())
        assert body["cache_prompt"] is False  # its cache knows no tenants


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("generic", {"top_k": 5, "min_tokens": 2, "stop": list("abcde"), "ignore_eos": True, "bad_words": ["a"]}),
        ("llama.cpp", {"stop_token_ids": [5], "min_tokens": 2, "include_stop_str_in_output": True}),
        ("sglang", {"allowed_token_ids": [5], "bad_words": ["a"], "prompt_logprobs": 1}),
    ],
)
async def test_features_that_the_server_lacks_are_refused_by_name_and_not_billed(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, kind: str, fields: dict[str, Any]
) -> None:
    server = await start_server(kind)
    async with start_over(client_of(server, "&context=512")) as gateway:
        for field, value in fields.items():
            with pytest.raises(openai.BadRequestError, match=field):
                await gateway.client.chat.completions.create(**ASK, extra_body={field: value})
        rows = await gateway.rows.wait_for(len(fields))
        assert {(row.outcome, row.prompt_tokens) for row in rows} == {("rejected", 0)}
        assert server.bodies == []


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMS = {
    "json_schema": {"guided_json": SCHEMA},
    "regex": {"structured_outputs": {"regex": "[a-z]"}},
    "choice": {"guided_choice": ["a", "b"]},
    "grammar": {"guided_grammar": "start: /a/"},
    "regex of SGLang": {"regex": "[a-z]"},
    "ebnf of SGLang": {"ebnf": 'root ::= "a"'},
    "strict": {"tools": [{"type": "function", "function": {"name": "now", "strict": True}}]},
}
PASSED_ON: dict[str, dict[str, tuple[str, Any]]] = {
    "vllm": {
        "json_schema": ("structured_outputs", {"json": json.dumps(SCHEMA, separators=(",", ":"))}),
        "regex": ("structured_outputs", {"regex": "[a-z]"}),
        "choice": ("structured_outputs", {"choice": ["a", "b"]}),
        "grammar": ("structured_outputs", {"grammar": "start: /a/"}),
        "regex of SGLang": ("structured_outputs", {"regex": "[a-z]"}),
        "ebnf of SGLang": ("structured_outputs", {"grammar": 'root ::= "a"'}),
    },
    "llama.cpp": {"json_schema": ("json_schema", SCHEMA)},
    "generic": {},
}


@pytest.mark.parametrize("kind", PASSED_ON)
async def test_a_response_format_is_sent_in_the_servers_field_or_refused_by_name(
    start_server: StartServer, folder: Path, client_of: ClientOf, start_over: StartOver, tool_card: ToolCard, kind: Any
) -> None:
    card = tool_card("hermes")
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    (folder / "chat_template.jinja").write_text(card.chat_template)
    server = await start_server(kind)
    async with start_over(client_of(server, "" if kind == "vllm" else "&context=512")) as gateway:
        for form, fields in FORMS.items():
            asking = gateway.client.chat.completions.create(**ASK, extra_body=fields)
            passed = PASSED_ON[kind].get(form)
            if passed is None:
                with pytest.raises(openai.BadRequestError, match=r"does not know .*(form|strict)"):
                    await asking
            else:
                await asking
                assert server.bodies[-1][passed[0]] == passed[1]
        assert len(server.bodies) == len(PASSED_ON[kind])


@pytest.mark.parametrize("kind", ["vllm", "generic", "llama.cpp"])
async def test_calls_marked_by_special_tokens_need_a_server_that_returns_token_ids(
    start_server: StartServer, folder: Path, client_of: ClientOf, start_over: StartOver, tool_card: ToolCard, kind: str
) -> None:
    card = tool_card("mistral", special=["[TOOL_CALLS]"])
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    (folder / "chat_template.jinja").write_text(card.chat_template)
    server = await start_server(kind)
    server.tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    server.text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    asked: dict[str, Any] = {**ASK, "max_tokens": 100, "tools": [{"type": "function", "function": {"name": "now"}}]}
    more = "" if kind != "generic" else "&context=512"
    async with start_over(client_of(server, more)) as gateway:
        if kind != "vllm":
            with pytest.raises(openai.BadRequestError, match="does not know tools"):
                await gateway.client.chat.completions.create(**asked)
            return
        choice = (await gateway.client.chat.completions.create(**asked)).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        assert server.bodies[0]["skip_special_tokens"] is False


async def test_logprobs_come_with_the_bytes_of_the_tokens(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    async with start_over(client_of(server)) as gateway:
        answer = await gateway.client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        assert "".join(one.token for one in content) == WHOLE[:40]
        assert (content[0].bytes, content[0].logprob) == ([ord("1")], -0.25)
        assert [one.logprob for one in content[0].top_logprobs] == [-0.25, -1.5]
        assert server.bodies[0]["logprobs"] == 2


async def limit_of(gateway: RunningGateway, cap: int) -> Any:
    (tenant,) = json.loads((await gateway.request("GET", "/admin/v1/tenants", b"", gateway.admin_key))[2])["data"]
    body: dict[str, Any] = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": cap}
    status, _, answer = await gateway.request("PUT", "/admin/v1/quotas", json.dumps(body).encode(), gateway.admin_key)
    assert status == 200, answer
    return json.loads(answer)["id"]


async def used(gateway: RunningGateway, quota_id: str) -> Any:
    await gateway.stored_usage.flush()
    answer = await gateway.request("GET", f"/admin/v1/quotas/{quota_id}", b"", gateway.admin_key)
    return json.loads(answer[2])["used"]


async def test_all_of_the_output_is_reserved_before_the_server_is_asked_and_what_it_reports_is_settled(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    server.stop_at, server.token_s = 23, 0.005
    async with start_over(client_of(server), stores_usage=True) as gateway:
        size = gateway.prompt_tokens("hello")
        quota_id = await limit_of(gateway, 2 * (size + 300) - 1)
        first = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 300}, stream=True)
        second = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 300}, stream=True)
        assert await text_of(first) == await text_of(second) == WHOLE[:23]
        assert [body["max_tokens"] for body in server.bodies] == [300, 299]  # the second finds one token less
        assert await used(gateway, quota_id) == 2 * (size + 24)


async def test_a_limit_that_has_not_so_much_left_shortens_the_answer_or_refuses_it(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    async with start_over(client_of(server), stores_usage=True) as gateway:
        size = gateway.prompt_tokens("hello")
        quota_id = await limit_of(gateway, size + 20)
        answer = await gateway.client.chat.completions.create(**ASK)  # no wait: further tokens cannot become free
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (WHOLE[:20], "length")
        assert server.bodies[0]["max_tokens"] == 20
        assert await used(gateway, quota_id) == size + 20
        with pytest.raises(openai.RateLimitError):
            await gateway.client.chat.completions.create(**ASK)
        assert len(server.bodies) == 1
