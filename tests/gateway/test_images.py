"""Images in chats and messages, as an engine of a model that sees gets them."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
import pytest
import tokenizers

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.images import ImageRules
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway

PLACEHOLDER = "<|image|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def png(width: int, height: int) -> bytes:
    """The head of a PNG file, which has its size."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + b"\x08\x02\0\0\0"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


WIDE, TALL = png(64, 32), png(32, 96)


@pytest.fixture
def seeing(card: ModelCard) -> ModelCard:
    """A card of a model that reads images, whose placeholder is a control token of the template."""
    tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    tokenizer.add_special_tokens([PLACEHOLDER])
    rules = ImageRules(
        image_token_id=tokenizer.token_to_id(PLACEHOLDER),
        start_token_id=0,
        end_token_id=0,
        patch_size=16,
        merge_size=2,
        min_pixels=1024,
        max_pixels=1 << 20,
        max_images=3,
        max_bytes=10_000,
        max_total_bytes=20_000,
        max_source_pixels=1 << 20,
    )
    files = {"tokenizer_json": tokenizer.to_str(), "vocab_size": card.vocab_size + 1, "chat_template": TEMPLATE}
    return msgspec.structs.replace(card, images=rules, **files)


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


BODIES = {CHAT: chat_of, MESSAGES: message_of}


async def refusal(gateway: RunningGateway, path: str, body: dict[str, Any]) -> str:
    status, _, answer = await gateway.post(path, body)
    assert status == 400, answer
    return str(json.loads(answer)["error"]["message"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
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


async def test_text_that_spells_the_placeholder_is_no_image(start_gateway: StartGateway, seeing: ModelCard) -> None:
    body = chat_of(WIDE)
    body["messages"][0]["content"].append({"type": "text", "text": PLACEHOLDER})
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        status, _, answer = await gateway.post(CHAT, body)
        assert status == 200, answer
        (submit,) = gateway.engine.submits
        assert seeing.images is not None
        assert submit.prompt_ids.count(seeing.images.image_token_id) == 2


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((b"GIF89a",), "not a PNG, JPEG or WebP file"),
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


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
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
        body = chat_of(WIDE)
        for url, words in (("https://example.com/a.png", "not followed"), ("data:image/png;base64,!", "base64")):
            body["messages"][0]["content"][-1]["image_url"]["url"] = url
            assert words in await refusal(gateway, CHAT, body)
        linked = message_of()
        linked["messages"][0]["content"].append({"type": "image", "source": {"type": "url", "url": "https://a.test/"}})
        assert "not followed" in await refusal(gateway, MESSAGES, linked)


async def test_images_of_an_assistant_are_refused(start_gateway: StartGateway, seeing: ModelCard) -> None:
    body = chat_of(WIDE)
    body["messages"] = [{"role": "user", "content": "a"}, {**body["messages"][0], "role": "assistant"}]
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        assert "the user's messages only" in await refusal(gateway, CHAT, body)
