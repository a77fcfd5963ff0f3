"""Images in chats, messages and responses, as an engine of a model that sees gets them."""

from __future__ import annotations

import base64
import json
import struct
import threading
from typing import Any

import msgspec
import pytest
import tokenizers

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Unavailable
from moiety_platform.inference import image_preparation
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import STANDARD
from moiety_wire.images import image_digest
from moiety_wire.messages import ModelCard

from .cards import IMAGE_PLACEHOLDER
from .conftest import RunningGateway, StartGateway

TOOL_TEMPLATE = (
    "{% macro shown(message) %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.role == 'tool' %}{{ shown(message) }}{% else %}{{ shown(message) }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}\n{% endfor %}"
)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def png(width: int, height: int) -> bytes:
    """The head of a PNG file, which has its size."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + b"\x08\x02\0\0\0"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


WIDE, TALL = png(64, 32), png(32, 96)
GIF = b"GIF89a" + struct.pack("<HH", 64, 32)


def chat_of(*images: bytes) -> dict[str, Any]:
    urls = [f"data:image/png;base64,{encoded(data)}" for data in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}, *parts]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def message_of(*images: bytes) -> dict[str, Any]:
    sources = [{"type": "base64", "media_type": "image/png", "data": encoded(data)} for data in images]
    blocks = [{"type": "image", "source": source} for source in sources]
    content = [{"type": "text", "text": "What is"}, {"type": "text", "text": "this?"}, *blocks]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def response_of(*images: bytes) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": data_url(data), "detail": "auto"} for data in images]
    texts = [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "this?"}]
    return {"model": "tiny", "input": [{"role": "user", "content": [*texts, *parts]}], "max_output_tokens": 16}


def linked_chat(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def linked_message(url: str) -> dict[str, Any]:
    content = [{"type": "image", "source": {"type": "url", "url": url}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def linked_response(url: str) -> dict[str, Any]:
    content = [{"type": "input_image", "image_url": url}]
    return {"model": "tiny", "input": [{"role": "user", "content": content}], "max_output_tokens": 16}


def chat_result(data: bytes) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    parts = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {"url": data_url(data)}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": parts},
    ]
    return {"model": "tiny", "messages": messages, "max_tokens": 4}


def message_result(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(data)}
    result = [{"type": "text", "text": "seen"}, {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]},
    ]
    return {"model": "tiny", "messages": messages, "max_tokens": 4}


def response_result(data: bytes) -> dict[str, Any]:
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": data_url(data)}]
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    return {"model": "tiny", "input": items, "max_output_tokens": 16}


def result_parts(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content parts of the tool result in a body of RESULTS."""
    last = body["input" if path == RESPONSES else "messages"][2]
    if path == MESSAGES:
        (last,) = last["content"]
    parts: list[dict[str, Any]] = last["output" if path == RESPONSES else "content"]
    return parts


BODIES = {CHAT: chat_of, MESSAGES: message_of, RESPONSES: response_of}
LINKED = {CHAT: linked_chat, MESSAGES: linked_message, RESPONSES: linked_response}
RESULTS = {CHAT: chat_result, MESSAGES: message_result, RESPONSES: response_result}
REPLACED = {
    CHAT: "messages.2.content.1.image_url",
    MESSAGES: "messages.2.content.0.content.1",
    RESPONSES: "input.function_call_output.input_image",
}


async def refusal(gateway: RunningGateway, path: str, body: dict[str, Any]) -> str:
    status, _, answer = await gateway.post(path, body)
    assert status == 400, answer
    error = json.loads(answer)["error"]
    param = error.get("details", error).get("param")
    assert param is None or param.partition(".")[0] in body, error
    return str(error["message"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_gif_file_is_an_image(start_gateway: StartGateway, seeing: ModelCard, path: str) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        status, _, answer = await gateway.post(path, BODIES[path](GIF))
        assert status == 200, answer
        assert [image.data for image in gateway.engine.submits[0].images] == [GIF]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_engine_gets_each_image_at_its_placeholders_and_all_of_its_tokens_are_billed(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        status, _, answer = await gateway.post(path, BODIES[path](WIDE, TALL))
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert [image.data for image in submit.images] == [WIDE, TALL]
        assert seeing.images is not None
        first, second = (image.start for image in submit.images)
        placeholders = [i for i, token_id in enumerate(submit.prompt_ids) if token_id == seeing.images.image_token_id]
        assert placeholders == [*range(first, first + 2), *range(second, second + 3)]  # tokens of 32 × 32 pixels
        (row,) = await gateway.rows.wait_for(1)
        assert row.prompt_tokens == len(submit.prompt_ids)


async def test_files_are_hashed_once_for_all_choices_and_in_a_thread(
    start_gateway: StartGateway, seeing: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def digest(data: bytes) -> bytes:
        threads.append(threading.current_thread())
        return image_digest(data)

    monkeypatch.setattr(image_preparation, "image_digest", digest)
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        status, _, answer = await gateway.post(CHAT, chat_of(WIDE) | {"n": 3})
        assert status == 200, answer
        assert [[image.digest for image in one.images] for one in gateway.engine.submits] == [[image_digest(WIDE)]] * 3
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_text_that_spells_the_placeholder_is_no_image(start_gateway: StartGateway, seeing: ModelCard) -> None:
    body = chat_of(WIDE)
    body["messages"][0]["content"].append({"type": "text", "text": IMAGE_PLACEHOLDER})
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        status, _, answer = await gateway.post(CHAT, body)
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert seeing.images is not None
        assert submit.prompt_ids.count(seeing.images.image_token_id) == 2


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((b"BM6\0",), "not a PNG, JPEG, WebP or GIF file"),
        ((png(4, 4000),), "too narrow"),
        ((png(2000, 2000),), "scale it down"),
        ((WIDE + bytes(10_000),), "it may have 10,000"),
        ((WIDE,) * 4, "a request may have 3"),
    ],
)
async def test_an_image_that_breaks_a_rule_is_refused_with_what_to_do(
    start_gateway: StartGateway, seeing: ModelCard, path: str, images: tuple[bytes, ...], words: str
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        assert words in await refusal(gateway, path, BODIES[path](*images))
        assert not gateway.engine.submits


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_model_that_reads_text_only_refuses_images(gateway: RunningGateway, path: str) -> None:
    assert "reads text only" in await refusal(gateway, path, BODIES[path](WIDE))


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_images_are_refused_before_a_template_that_knows_texts_only_sees_them(
    start_gateway: StartGateway, card: ModelCard, path: str
) -> None:
    template = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
    async with start_gateway([FakeEngineClient(msgspec.structs.replace(card, chat_template=template))]) as gateway:
        assert "reads text only" in await refusal(gateway, path, BODIES[path](WIDE))


async def test_links_and_broken_base64_are_refused(start_gateway: StartGateway, seeing: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        for path, with_url in LINKED.items():
            assert "follows no links" in await refusal(gateway, path, with_url("https://example.com/a.png"))
            assert "neither a data URL nor a link" in await refusal(gateway, path, with_url("ftp://example.com/a.png"))
        for path in (CHAT, RESPONSES):
            assert "base64" in await refusal(gateway, path, LINKED[path]("data:image/png;base64,!"))
        assert not gateway.engine.submits


async def test_images_of_an_assistant_are_refused(start_gateway: StartGateway, seeing: ModelCard) -> None:
    body = chat_of(WIDE)
    body["messages"] = [{"role": "user", "content": "a"}, {**body["messages"][0], "role": "assistant"}]
    response = response_of(WIDE)
    response["input"][0]["role"] = "assistant"
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        assert "the user's messages" in await refusal(gateway, CHAT, body)
        assert "images and files are for the user" in await refusal(gateway, RESPONSES, response)


async def test_a_stored_response_goes_on_with_its_images(start_gateway: StartGateway, seeing: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        status, _, answer = await gateway.post(RESPONSES, {**response_of(WIDE), "store": True})
        assert status == 200, answer
        response_id = json.loads(answer)["id"]
        (item,) = (await gateway.client.responses.input_items.list(response_id)).data
        assert item.content[-1].image_url == data_url(WIDE)
        more = {**response_of(TALL), "previous_response_id": response_id, "store": True}
        status, _, answer = await gateway.post(RESPONSES, more)
        assert status == 200, answer
        assert [image.data for image in gateway.engine.submits[-1].images] == [WIDE, TALL]


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_image_in_a_tools_result_is_in_its_place_or_right_after_the_results(
    start_gateway: StartGateway, seeing: ModelCard, path: str, shows: bool
) -> None:
    template = TOOL_TEMPLATE if shows else TOOL_TEMPLATE.replace("{{ shown(message) }}", "{{ message.content }}", 1)
    card = msgspec.structs.replace(seeing, chat_template=template)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        status, headers, answer = await gateway.post(path, RESULTS[path](WIDE))
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert [image.data for image in submit.images] == [WIDE]
        prompt = tokenizers.Tokenizer.from_str(card.tokenizer_json).decode(submit.prompt_ids, skip_special_tokens=False)
        image = IMAGE_PLACEHOLDER * 2
        told = f"tool:seen{image}" if shows else f"tool:seen\n[The image is in the next message.]user:{image}"
        assert told in prompt
        assert "x-moiety-ignored-fields" not in headers


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("data", [b"GIF89a", b"BM6", png(4, 4000), WIDE + bytes(10_000)])
async def test_an_image_in_a_tools_result_that_breaks_a_rule_becomes_a_text(
    start_gateway: StartGateway, seeing: ModelCard, path: str, data: bytes
) -> None:
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        status, headers, answer = await gateway.post(path, RESULTS[path](data))
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert not submit.images
        prompt = tokenizers.Tokenizer.from_str(card.tokenizer_json).decode(submit.prompt_ids)
        assert "seen\n[This image is not shown: " in prompt
        assert headers["x-moiety-ignored-fields"] == REPLACED[path]


async def test_the_oldest_images_of_tools_beyond_the_limit_become_texts(
    start_gateway: StartGateway, seeing: ModelCard
) -> None:
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    body = chat_result(WIDE)
    question, *turn = body["messages"]
    body["messages"] = [{"role": "user", "content": chat_of(TALL)["messages"][0]["content"]}, *turn * 4]
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        status, headers, answer = await gateway.post(CHAT, body)
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert [image.data for image in submit.images] == [TALL, WIDE, WIDE]
        assert headers["x-moiety-ignored-fields"] == "messages.2.content.1.image_url, messages.4.content.1.image_url"
        body["messages"] = [question, {"role": "user", "content": chat_of(*[TALL] * 4)["messages"][0]["content"]}]
        assert "a request may have 3" in await refusal(gateway, CHAT, body)


@pytest.mark.parametrize("detail", ["auto", "high"])
async def test_a_level_of_detail_has_no_effect_and_is_named(
    start_gateway: StartGateway, seeing: ModelCard, detail: str
) -> None:
    chat, response = chat_of(WIDE), response_of(WIDE)
    chat["messages"][0]["content"][-1]["image_url"]["detail"] = detail
    response["input"][0]["content"][-1]["detail"] = detail
    result = response_result(WIDE)
    result["input"][-1]["output"][-1]["detail"] = detail
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        for path, body, name in (
            (CHAT, chat, "messages.content.image_url.detail"),
            (RESPONSES, response, "input.input_image.detail"),
            (RESPONSES, result, "input.input_image.detail"),
        ):
            status, headers, answer = await gateway.post(path, body)
            assert status == 200, answer
            assert headers.get("x-moiety-ignored-fields") == (None if detail == "auto" else name)


async def test_a_conversation_that_is_too_long_is_shortened_with_its_images(
    start_gateway: StartGateway, seeing: ModelCard
) -> None:
    card = msgspec.structs.replace(seeing, max_context_tokens=200)
    body = response_of(WIDE)
    body["input"] = [*body["input"], {"role": "assistant", "content": "b" * 150}, *response_of(TALL)["input"]]
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        assert "maximum context length is 200 tokens" in await refusal(gateway, RESPONSES, body)
        status, headers, answer = await gateway.post(RESPONSES, {**body, "truncation": "auto"})
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert [image.data for image in submit.images] == [TALL]
        assert headers["x-moiety-adjusted-fields"] == "truncation=1 of 3 messages left out"


async def test_the_count_of_tokens_has_those_of_images(start_gateway: StartGateway, seeing: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        for path, count, body in (
            (MESSAGES, f"{MESSAGES}/count_tokens", message_of(TALL)),
            (RESPONSES, f"{RESPONSES}/input_tokens", response_of(TALL)),
        ):
            await gateway.post(path, body)
            counted = {name: value for name, value in body.items() if not name.startswith("max_")}
            status, _, answer = await gateway.post(count, counted)
            assert status == 200, answer
            assert json.loads(answer)["input_tokens"] == len(gateway.engine.submits[-1].prompt_ids)


async def test_images_go_to_the_engines_whose_rules_their_placeholders_follow_and_are_counted_by_them(
    start_gateway: StartGateway, seeing: ModelCard
) -> None:
    assert seeing.images is not None
    longer = seeing.max_context_tokens + 1
    blind = msgspec.structs.replace(seeing, engine_id="blind", images=None, max_context_tokens=longer)
    coarse_rules = msgspec.structs.replace(seeing.images, patch_size=32)
    shorter = seeing.max_context_tokens - 1
    coarse = msgspec.structs.replace(seeing, engine_id="coarse", images=coarse_rules, max_context_tokens=shorter)
    engines = [FakeEngineClient(card) for card in (blind, coarse, seeing)]
    async with start_gateway(engines) as gateway:
        for path, count, body in (
            (MESSAGES, f"{MESSAGES}/count_tokens", message_of(TALL)),
            (RESPONSES, f"{RESPONSES}/input_tokens", response_of(TALL)),
        ):
            for _ in range(3):
                status, _, answer = await gateway.post(path, body)
                assert status == 200, answer
            counted = {name: value for name, value in body.items() if not name.startswith("max_")}
            status, _, answer = await gateway.post(count, counted)
            assert status == 200, answer
            assert json.loads(answer)["input_tokens"] == len(engines[2].submits[-1].prompt_ids)
    assert [len(engine.submits) for engine in engines] == [0, 0, 6]


async def test_images_wait_for_no_engine_with_other_rules(seeing: ModelCard) -> None:
    async with Replicas([FakeEngineClient(seeing)]) as replicas:
        assert seeing.images is not None
        assert replicas.choose(seeing.model, STANDARD, images=seeing.images)[1].card == seeing
        other = msgspec.structs.replace(seeing.images, patch_size=32)
        with pytest.raises(Unavailable):
            replicas.choose(seeing.model, STANDARD, images=other)
