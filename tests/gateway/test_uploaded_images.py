"""Images by the id of an uploaded file: whose they are, their limits, and that they count as inline ones do."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.images import image_digest
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .test_files import refuse
from .test_images import (
    BODIES,
    CHAT,
    MESSAGES,
    REPLACED,
    RESPONSES,
    RESULTS,
    TALL,
    TOOL_TEMPLATE,
    WIDE,
    data_url,
    png,
    result_parts,
)
from .test_kept_responses import new_key

PATHS = (CHAT, MESSAGES, RESPONSES)
COUNTS = {MESSAGES: "count_tokens", RESPONSES: "input_tokens"}


def part_of(path: str, file_id: str) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {
        CHAT: {"type": "file", "file": {"file_id": file_id}},
        MESSAGES: {"type": "image", "source": {"type": "file", "file_id": file_id}},
        RESPONSES: {"type": "input_image", "file_id": file_id},
    }
    return parts[path]


def uploaded(path: str, *file_ids: str) -> dict[str, Any]:
    """Return a request with images by the ids of their files."""
    body = BODIES[path]()
    (message,) = body["input" if path == RESPONSES else "messages"]
    message["content"] += [part_of(path, file_id) for file_id in file_ids]
    return body


async def upload(gateway: RunningGateway, data: bytes, purpose: Any = "vision") -> str:
    return str((await gateway.client.files.create(file=("a.png", data), purpose=purpose)).id)


@pytest.mark.parametrize("path", PATHS)
async def test_an_uploaded_image_is_the_same_to_the_engine_and_on_the_bill_as_an_inline_one(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        wide, tall = await upload(gateway, WIDE), await upload(gateway, TALL, "user_data")
        for body in (BODIES[path](WIDE, TALL, WIDE), uploaded(path, wide, tall, wide)):
            status, _, answer = await gateway.post(path, body)
            assert status == 200, answer
        inline, by_id = gateway.engine.submits
        assert [image.data for image in by_id.images] == [WIDE, TALL, WIDE]
        assert by_id.images == inline.images and by_id.prompt_ids == inline.prompt_ids
        assert by_id.images[0].digest == image_digest(WIDE)
        first, second = await gateway.rows.wait_for(2)
        assert first.prompt_tokens == second.prompt_tokens
        if path in COUNTS:
            counted = {name: value for name, value in body.items() if not name.startswith("max_")}
            _, _, answer = await gateway.post(f"{path}/{COUNTS[path]}", counted)
            assert json.loads(answer)["input_tokens"] == first.prompt_tokens
        if path == CHAT:
            _, _, answer = await gateway.post("/tokenize", {"model": "tiny", "messages": body["messages"]})
            assert json.loads(answer)["tokens"] == by_id.prompt_ids


@pytest.mark.parametrize("path", PATHS)
async def test_a_file_that_is_no_image_within_the_limits_is_refused_with_its_place(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    place = {CHAT: "content.2.file", MESSAGES: "content.2", RESPONSES: "input.message.input_image"}[path]
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        for data, purpose, words in (
            (b"BM6\0", "user_data", "plain text" if path == CHAT else "not a PNG, JPEG, WebP or GIF file"),
            (png(2000, 2000), "vision", "scale it down"),
            (WIDE + bytes(10_000), "vision", "it may have 10,000"),
            (WIDE, "batch", "purpose 'batch'"),
        ):
            status, _, answer = await gateway.post(path, uploaded(path, await upload(gateway, data, purpose)))
            message = json.loads(answer)["error"]["message"]
            assert status == 400 and words in message and place in message, answer
        large = [await upload(gateway, WIDE + bytes(9_000 + number)) for number in range(3)]
        status, _, answer = await gateway.post(path, uploaded(path, *large))
        assert status == 400 and "too many bytes together" in json.loads(answer)["error"]["message"]
        assert not gateway.engine.submits


@pytest.mark.parametrize("path", PATHS)
async def test_files_of_others_deleted_and_unknown_ones_are_not_there(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        foreign, deleted = await upload(gateway, WIDE), await upload(gateway, WIDE)
        await gateway.client.files.delete(deleted)
        body = uploaded(path, foreign)
        status, _, answer = await gateway.post(path, body)
        assert status == 200, answer
        _, _, answer = await gateway.request("GET", "/admin/v1/projects", key=gateway.admin_key)
        project = json.dumps({"name": "another", "tenant_id": json.loads(answer)["data"][0]["tenant_id"]}).encode()
        _, _, answer = await gateway.request("POST", "/admin/v1/projects", project, gateway.admin_key)
        other = await new_key(gateway, project_id=json.loads(answer)["id"])
        for file_id, key in ((foreign, other), (deleted, None), ("file-none", None), ("x" * 3000, None)):
            status, _, answer = await gateway.post(path, uploaded(path, file_id), key)
            assert status == 404 and "there is no file" in json.loads(answer)["error"]["message"], answer


@pytest.mark.parametrize("path", PATHS)
async def test_an_uploaded_image_in_a_tools_result_that_is_gone_becomes_a_text(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        file_id = await upload(gateway, WIDE)
        body = RESULTS[path](WIDE)
        result_parts(path, body)[1] = part_of(path, file_id)
        status, _, answer = await gateway.post(path, body)
        assert status == 200, answer
        assert [image.data for image in gateway.engine.submits[-1].images] == [WIDE]
        await gateway.client.files.delete(file_id)
        status, headers, answer = await gateway.post(path, body)
        assert status == 200, answer
        assert not gateway.engine.submits[-1].images
        assert headers["x-moiety-ignored-fields"] == REPLACED[path].replace("image_url", "file" if path == CHAT else "")


async def test_a_stored_response_keeps_the_id_and_reads_the_file_again(
    start_gateway: StartGateway, seeing: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        file_id = await upload(gateway, WIDE)
        first = await gateway.client.responses.create(**uploaded(RESPONSES, file_id), store=True)
        (item,) = (await gateway.client.responses.input_items.list(first.id)).data
        assert item.content[-1].file_id == file_id
        again = await gateway.client.responses.create(
            model="tiny", input="and now?", previous_response_id=first.id, max_output_tokens=16
        )
        assert again.status and [image.data for image in gateway.engine.submits[-1].images] == [WIDE]


async def test_a_file_part_may_have_the_image_itself_and_nothing_else(
    start_gateway: StartGateway, seeing: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        for fields, words in (
            ({"file_data": data_url(WIDE)}, None),
            ({"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}, "not valid base64"),
            ({"file_data": data_url(WIDE), "file_id": "file-1"}, "it must have either the 'file_id'"),
            ({}, "it must have either the 'file_id'"),
        ):
            body = uploaded(CHAT)
            body["messages"][0]["content"].append({"type": "file", "file": fields})
            status, _, answer = await gateway.post(CHAT, body)
            assert status == (200 if words is None else 400), answer
            assert words is None or words in json.loads(answer)["error"]["message"]
        assert [image.data for image in gateway.engine.submits[0].images] == [WIDE]
        body = uploaded(RESPONSES, "file-1")
        body["input"][0]["content"][-1]["image_url"] = data_url(WIDE)
        status, _, answer = await gateway.post(RESPONSES, body)
        assert status == 400 and "send only one of the two" in json.loads(answer)["error"]["message"]


async def test_images_wait_for_no_object_store_that_is_away(start_gateway: StartGateway, seeing: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        file_id = await upload(gateway, WIDE)
        gateway.objects.guard = refuse
        status, headers, answer = await gateway.post(CHAT, uploaded(CHAT, file_id))
        assert status == 503 and headers["retry-after"], answer
