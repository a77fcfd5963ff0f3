"""PDF files and texts as documents, through each API: their text is read within limits, or they are refused."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from prometheus_client import CollectorRegistry

from moiety_platform.bootstrap.document_preparation import document_preparation_of
from moiety_platform.document_extraction.extractor import DocumentLimits, DocumentRefused
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.files.prompt_files import UploadedPromptFiles
from moiety_platform.inference.document_preparation import MAX_INLINE_BYTES
from moiety_platform.inference.link_fetcher import LinkFetcher
from moiety_platform.inference.prompt_documents import _PIECE_BYTES, shown_document, text_of_file
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_wire.messages import ModelCard

from .batch_requests import jsonl, results, submit, wait_for
from .conftest import RunningGateway, StartGateway
from .pdf_files import compressed_pdf, encrypted_pdf, endless_pdf, pdf, recursive_pdf
from .test_images import CHAT, MESSAGES, RESPONSES, RESULTS, TOOL_TEMPLATE, WIDE, result_parts
from .test_uploaded_images import COUNTS, PATHS

PAGES = pdf("The sky is green.", "", "So is the sea.")
READ = "[page 1]\nThe sky is green.\n\n[page 2 has no text]\n\n[page 3]\nSo is the sea."
PLACES = {CHAT: "messages.0.content.0.file", MESSAGES: "messages.0.content.0", RESPONSES: "input.message.input_file"}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part_of(path: str, data: bytes) -> dict[str, Any]:
    """Return a document in the fields of the API, with the title `a.pdf`."""
    url = f"data:application/pdf;base64,{encoded(data)}"
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(data)}
    parts: dict[str, dict[str, Any]] = {
        CHAT: {"type": "file", "file": {"filename": "a.pdf", "file_data": url}},
        MESSAGES: {"type": "document", "title": "a.pdf", "source": source},
        RESPONSES: {"type": "input_file", "filename": "a.pdf", "file_data": url},
    }
    return parts[path]


def uploaded_part(path: str, file_id: str) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {
        CHAT: {"type": "file", "file": {"filename": "a.pdf", "file_id": file_id}},
        MESSAGES: {"type": "document", "title": "a.pdf", "source": {"type": "file", "file_id": file_id}},
        RESPONSES: {"type": "input_file", "filename": "a.pdf", "file_id": file_id},
    }
    return parts[path]


def text_of(path: str, text: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": text}


def asking(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*parts, text_of(path, "What colour?")]}]
    if path == RESPONSES:
        return {"model": "tiny", "input": messages, "max_output_tokens": 16}
    return {"model": "tiny", "messages": messages, "max_tokens": 4}


async def upload(gateway: RunningGateway, data: bytes, purpose: Any = "user_data") -> str:
    return str((await gateway.client.files.create(file=("a.pdf", data), purpose=purpose)).id)


async def refusal(gateway: RunningGateway, path: str, body: dict[str, Any]) -> str:
    status, _, answer = await gateway.post(path, body)
    error = json.loads(answer)["error"]
    code = error["details"]["error_code"] if path == MESSAGES else error["code"]
    assert (status, code) == (400, "invalid_document"), answer
    return str(error["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_a_pdf_file_is_read_as_the_text_of_its_pages(gateway: RunningGateway, path: str) -> None:
    file_id = await upload(gateway, PAGES)
    asked = asking(path, part_of(path, PAGES))
    same = (
        asked,
        asking(path, uploaded_part(path, file_id)),
        asking(path, text_of(path, shown_document(READ, "a.pdf", None))),
    )
    for body in same:
        status, _, answer = await gateway.post(path, body)
        assert status == 200, answer
    prompts = [one.prompt_ids for one in gateway.engine.submits]
    assert prompts[0] == prompts[1] == prompts[2]
    rows = await gateway.rows.wait_for(3)
    assert len({row.prompt_tokens for row in rows}) == 1
    if path in COUNTS:
        counted = {name: value for name, value in asked.items() if not name.startswith("max_")}
        _, _, answer = await gateway.post(f"{path}/{COUNTS[path]}", counted)
        assert json.loads(answer)["input_tokens"] == rows[0].prompt_tokens
    else:
        _, _, answer = await gateway.post("/tokenize", {"model": "tiny", "messages": asked["messages"]})
        assert json.loads(answer)["tokens"] == prompts[0]


async def test_a_chat_in_the_form_of_responses_has_documents_too(gateway: RunningGateway) -> None:
    for path, body in (
        (CHAT, asking(CHAT, part_of(CHAT, PAGES))),
        (CHAT, asking(RESPONSES, part_of(RESPONSES, PAGES))),
    ):
        status, _, answer = await gateway.post(path, body)
        assert status == 200, answer
    first, second = gateway.engine.submits
    assert first.prompt_ids == second.prompt_ids


async def test_the_vendors_clients_send_documents(gateway: RunningGateway) -> None:
    url = f"data:application/pdf;base64,{encoded(PAGES)}"
    inline: Any = [{"type": "input_file", "filename": "a.pdf", "file_data": url}, {"type": "input_text", "text": "a"}]
    await gateway.client.responses.create(model="tiny", input=[{"role": "user", "content": inline}])
    part: Any = {"type": "file", "file": {"filename": "a.pdf", "file_data": url}}
    asked: Any = [{"role": "user", "content": [part, {"type": "text", "text": "a"}]}]
    await gateway.client.chat.completions.create(model="tiny", messages=asked, max_tokens=2)
    async with gateway.anthropic as client:
        file = await client.beta.files.upload(file=("a.pdf", PAGES, "application/pdf"))
        assert file.mime_type == "application/pdf"
        block: Any = {"type": "document", "title": "a.pdf", "source": {"type": "file", "file_id": file.id}}
        said: Any = [{"role": "user", "content": [block, {"type": "text", "text": "a"}]}]
        await client.beta.messages.create(model="tiny", messages=said, max_tokens=2)
    prompts = [one.prompt_ids for one in gateway.engine.submits]
    assert len(prompts) == 3 and prompts[0] == prompts[1] == prompts[2]


@pytest.mark.parametrize("path", PATHS)
async def test_plain_text_and_bare_base64_are_documents_and_images_by_id_stay_images(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    async with start_gateway([FakeEngineClient(seeing)]) as gateway:
        part = part_of(path, "é".encode())
        if path != MESSAGES:
            (part["file"] if path == CHAT else part)["file_data"] = encoded("é".encode())
        for body in (asking(path, part), asking(path, text_of(path, shown_document("é", "a.pdf", None)))):
            status, _, answer = await gateway.post(path, body)
            assert status == 200, answer
        first, second = gateway.engine.submits
        assert first.prompt_ids == second.prompt_ids
        if path == CHAT:
            status, _, answer = await gateway.post(path, asking(path, uploaded_part(path, await upload(gateway, WIDE))))
            assert status == 200, answer
            assert [image.data for image in gateway.engine.submits[-1].images] == [WIDE]


@pytest.mark.parametrize("path", PATHS)
async def test_a_document_that_cannot_be_read_is_refused_with_its_place_and_reason(
    start_gateway: StartGateway, card: ModelCard, path: str
) -> None:
    limits = {"max_document_pages": 3, "max_document_characters": 200, "max_document_bytes": 400_000}
    cases: tuple[tuple[bytes, str], ...] = (
        (pdf("", ""), "has no text, as a scan"),
        (encrypted_pdf("secret", "password"), "is encrypted"),
        (b"%PDF-1.7 text", "cannot be read (PdfStreamError)"),
        (recursive_pdf(), "cannot be read"),
        (pdf(*"abcd"), "has 4 pages, of which 3 are allowed"),
        (pdf("a" * 300), "has more than the 200 characters"),
        (b"a" * 300, "may have 200 characters"),
        (PAGES + b" " * 400_000, "may have 400,000 bytes"),
        (compressed_pdf(b" " * (80 << 20)), "too large when it is decompressed"),
        (b"\xff\xfe", "is neither a PDF file nor plain text"),
    )
    async with start_gateway([FakeEngineClient(card)], **limits) as gateway:
        for data, words in cases:
            message = await refusal(gateway, path, asking(path, part_of(path, data)))
            assert words in message and f"at {PLACES[path]} " in message, message
        file_id = await upload(gateway, cases[0][0])
        message = await refusal(gateway, path, asking(path, uploaded_part(path, file_id)))
        assert cases[0][1] in message and f"{file_id!r} at {PLACES[path]}" in message
        many = [part_of(path, pdf("a", str(number))) for number in range(2)]
        assert "has 2 pages, of which 1 are allowed" in await refusal(gateway, path, asking(path, *many))
        assert not gateway.engine.submits
        status, _, answer = await gateway.post(path, asking(path, many[0], many[0], many[0]))  # read once
        assert status == 200, answer


@pytest.mark.parametrize("path", PATHS)
async def test_a_file_that_is_named_twice_costs_its_characters_twice(
    start_gateway: StartGateway, card: ModelCard, path: str
) -> None:
    data = b"a" * 300
    async with start_gateway([FakeEngineClient(card)], max_document_characters=500) as gateway:
        for part in (part_of(path, data), uploaded_part(path, await upload(gateway, data))):
            message = await refusal(gateway, path, asking(path, part, part))
            assert "may have 500 characters" in message
            assert f"at {PLACES[path].replace('content.0', 'content.1')} " in message
            assert not gateway.engine.submits
        status, _, answer = await gateway.post(path, asking(path, part))
        assert status == 200, answer


@pytest.mark.parametrize("size", [0, 1, _PIECE_BYTES - 1, _PIECE_BYTES, 2 * _PIECE_BYTES + 1])
def test_a_text_file_is_decoded_in_pieces_as_a_whole_is(size: int) -> None:
    text = "é😀\ufeffa" * (size // 10) + "a" * (size % 10)
    data = b"\xef\xbb\xbf" + text.encode()
    assert text_of_file(data, size) == text
    for broken in (data + b"\xc3", data + b"\xff" + data, data + b"\0"):
        with pytest.raises(DocumentRefused, match="neither a PDF file nor plain text"):
            text_of_file(broken, len(broken))
    if size > _PIECE_BYTES:
        assert 10 < len(text_of_file(data, 10)) < len(text)


async def test_large_text_files_are_decoded_beside_the_event_loop(
    start_gateway: StartGateway, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = list[str]()

    def decode(data: bytes, max_characters: int) -> str:
        decoding.append(threading.current_thread().name)
        return text_of_file(data, max_characters)

    monkeypatch.setattr("moiety_platform.inference.document_preparation.text_of_file", decode)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        for size in (MAX_INLINE_BYTES, MAX_INLINE_BYTES + 1):
            await gateway.post(CHAT, asking(CHAT, part_of(CHAT, b"a" * size)))
    first, second = decoding
    assert first == threading.current_thread().name and second.startswith("document-text")


async def test_a_pdf_file_that_only_restricts_its_use_is_read(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post(CHAT, asking(CHAT, part_of(CHAT, encrypted_pdf("The sky.", ""))))
    assert status == 200, answer


@pytest.mark.parametrize("path", PATHS)
async def test_links_and_wrong_base64_are_refused(gateway: RunningGateway, path: str) -> None:
    part = part_of(path, PAGES)
    holder, name = {CHAT: (part.get("file"), "file_data"), MESSAGES: (part.get("source"), "data")}.get(
        path, (part, "file_data")
    )
    assert holder is not None
    holder[name] = "?"
    assert "not valid base64" in await refusal(gateway, path, asking(path, part))
    if path == CHAT:
        return
    linked: dict[str, Any] = {"type": "input_file", "file_url": "https://example.com/a.pdf"}
    if path == MESSAGES:
        linked = {"type": "document", "source": {"type": "url", "url": "https://example.com/a.pdf"}}
    status, _, answer = await gateway.post(path, asking(path, linked))
    assert status == 400 and "follows no links" in json.loads(answer)["error"]["message"], answer
    assert not gateway.engine.submits


@pytest.mark.parametrize("path", PATHS)
async def test_a_document_of_a_tool_is_read_and_becomes_a_text_if_it_cannot_be(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        for data, words in ((PAGES, shown_document(READ, "a.pdf", None)), (pdf(""), "[This document is not shown: ")):
            body = RESULTS[path](WIDE)
            result_parts(path, body)[1] = part_of(path, data)
            status, headers, answer = await gateway.post(path, body)
            assert status == 200, answer
            (*_, one) = gateway.engine.submits
            prompt = tokenizers.Tokenizer.from_str(card.tokenizer_json).decode(one.prompt_ids)
            assert f"seen\n{words}" in prompt, prompt
            assert ("x-moiety-ignored-fields" in headers) == (data != PAGES)
    place = {CHAT: "messages.2.content.1.file", MESSAGES: "messages.2.content.0.content.1"}
    assert headers["x-moiety-ignored-fields"] == place.get(path, "input.function_call_output.input_file")


async def test_a_stored_response_goes_on_with_its_document(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post(RESPONSES, {**asking(RESPONSES, part_of(RESPONSES, PAGES)), "store": True})
    assert status == 200, answer
    response_id = json.loads(answer)["id"]
    (item,) = (await gateway.client.responses.input_items.list(response_id)).data
    assert item.content[0].filename == "a.pdf" and item.content[0].file_data.endswith(encoded(PAGES))
    more = {**asking(RESPONSES), "previous_response_id": response_id}
    status, _, answer = await gateway.post(RESPONSES, more)
    assert status == 200, answer
    first, second = gateway.engine.submits
    assert len(second.prompt_ids) > len(first.prompt_ids) > len(READ) // 4


async def test_lines_of_batches_have_documents_and_fail_alone(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([engine := FakeEngineClient(card)], stores_usage=True) as gateway:
        for path in PATHS:
            lines = [
                {"custom_id": name, "method": "POST", "url": path, "body": asking(path, part_of(path, data))}
                for name, data in (("read", PAGES), ("scan", pdf("")))
            ]
            batch = await wait_for(gateway, await submit(gateway, jsonl(lines), endpoint=path), "completed")
            (read,) = await results(gateway, batch.output_file_id)
            (scan,) = await results(gateway, batch.error_file_id)
            assert (read["custom_id"], read["response"]["status_code"]) == ("read", 200)
            assert scan["custom_id"] == "scan" and "has no text" in json.dumps(scan)
        prompts = [one.prompt_ids for one in engine.submits]
        assert len(prompts) == 3 and all(len(prompt) == len(prompts[0]) for prompt in prompts)


async def assert_served(gateway: RunningGateway, *parts: dict[str, Any]) -> None:
    status, _, answer = await gateway.post(CHAT, asking(CHAT, *parts))
    assert status == 200, answer


async def begin_hostile_request(
    gateway: RunningGateway, until: Callable[[Callable[[], object]], Any]
) -> tuple[asyncio.Task[Any], Counter[str]]:
    """Return a request whose document is being read, and the requests with documents that are open, by tenant."""
    hostile = asyncio.create_task(gateway.post(CHAT, asking(CHAT, part_of(CHAT, endless_pdf()))))
    requests = gateway.assembled.services.documents._requests._num_open
    await until(lambda: requests.total() == 1)
    return hostile, requests


async def test_a_hostile_file_costs_only_its_own_request(
    start_gateway: StartGateway, card: ModelCard, until: Callable[[Callable[[], object]], Any]
) -> None:
    limits = {"document_processes": 1, "document_cpu_s": 1.0, "max_document_requests_per_tenant": 1}
    async with start_gateway([FakeEngineClient(card)], **limits) as gateway:
        hostile, _ = await begin_hostile_request(gateway, until)
        await assert_served(gateway)
        status, headers, answer = await gateway.post(CHAT, asking(CHAT, part_of(CHAT, PAGES)))
        assert (status, json.loads(answer)["error"]["code"]) == (429, "too_many_documents") and headers["retry-after"]
        assert not hostile.done()
        status, _, answer = await hostile
        assert status == 400 and "takes more than 1 s of processor time" in json.loads(answer)["error"]["message"]
        await assert_served(gateway, part_of(CHAT, PAGES))


async def test_a_request_that_is_not_admitted_costs_no_process(
    start_gateway: StartGateway, card: ModelCard, until: Callable[[Callable[[], object]], Any]
) -> None:
    limits = {"document_processes": 1, "document_cpu_s": 3.0, "max_inflight_per_tenant": 1}
    async with start_gateway([FakeEngineClient(card)], **limits) as gateway:
        hostile, _ = await begin_hostile_request(gateway, until)
        status, headers, answer = await gateway.post(CHAT, asking(CHAT, part_of(CHAT, b"%PDF-1.7 damaged")))
        assert (status, headers["x-moiety-reason"]) == (429, "tenant_queue_full"), answer
        assert (await hostile)[0] == 400
        await assert_served(gateway, part_of(CHAT, PAGES))


async def test_a_client_that_leaves_frees_its_place_when_its_process_has_ended(
    start_gateway: StartGateway, card: ModelCard, until: Callable[[Callable[[], object]], Any]
) -> None:
    async with start_gateway([FakeEngineClient(card)], document_processes=1, document_cpu_s=1.0) as gateway:
        hostile, requests = await begin_hostile_request(gateway, until)
        hostile.cancel()
        await until(lambda: not requests)
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.prompt_tokens) == ("disconnected", 0)
        await assert_served(gateway, part_of(CHAT, PAGES))


async def test_the_limits_follow_the_settings(tmp_path: Path, gateway: RunningGateway) -> None:
    live = LiveSettings(GatewaySettings(data_dir=tmp_path))
    uploaded = UploadedPromptFiles(gateway.assembled.services.batches.files)
    cache = DocumentTextCache(0)
    prepared = document_preparation_of(live.now, live, uploaded, cache, CollectorRegistry(), LinkFetcher())
    assert (prepared.limits, cache.max_bytes) == (DocumentLimits(), 64 << 20)
    await live.change(
        GatewaySettings(
            data_dir=tmp_path, document_memory_bytes=100 << 20, document_cpu_s=2, document_wall_s=3,
            max_document_bytes=2048, max_document_pages=4, max_document_characters=5,
            max_document_requests_per_tenant=6, document_cache_bytes=7,
        )
    )  # fmt: skip
    assert (prepared.limits, cache.max_bytes) == (DocumentLimits(2048, 4, 5, 2, 3, 100 << 20, 6), 7)
    await prepared.close()
