# ruff: noqa: F811  fixtures are imported
"""Links to documents in requests: followed where the operator has enabled them, apart from links to images."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.inference.link_fetcher import DOCUMENT, CannotFetch, LinkFetcher, LinkLimits
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_wire.messages import ModelCard

from .conftest import StartGateway
from .pdf_files import endless_pdf
from .test_documents import PAGES, PLACES, READ, asking, part_of, refusal
from .test_image_links import file_server, sends
from .test_images import LINKED, MESSAGES, RESPONSES, RESULTS, TOOL_TEMPLATE, WIDE, result_parts
from .test_quotas import (
    Limited,
    limit,
    limited,  # noqa: F401  a fixture
)
from .test_uploaded_images import COUNTS

PATHS = (MESSAGES, RESPONSES)
FOLLOWS: dict[str, Any] = {"max_document_links": 2, "document_link_networks": ("127.0.0.0/8",)}
ONLY_IMAGES: dict[str, Any] = {"max_image_links": 2, "image_link_networks": ("127.0.0.0/8",)}


def linked(path: str, url: str) -> dict[str, Any]:
    """Return a link to a document in the fields of the API, with the title `a.pdf`."""
    if path == MESSAGES:
        return {"type": "document", "title": "a.pdf", "source": {"type": "url", "url": url}}
    return {"type": "input_file", "filename": "a.pdf", "file_url": url}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("data", [PAGES, "é".encode()])
async def test_a_linked_document_is_read_as_one_that_is_sent(
    start_gateway: StartGateway, card: ModelCard, path: str, data: bytes
) -> None:
    async with (
        file_server(sends(data)) as (url, heads),
        start_gateway([FakeEngineClient(card)], **FOLLOWS) as gateway,
    ):
        status, _, answer = await gateway.post(path, asking(path, linked(path, url), linked(path, url)))
        assert status == 200, answer
        assert len(heads) == 1 and b"application/pdf" in heads[0] and b"authorization" not in heads[0].lower()
        await gateway.post(path, asking(path, part_of(path, data), part_of(path, data)))
        first, second = gateway.engine.submits
        assert first.prompt_ids == second.prompt_ids


@pytest.mark.parametrize("path", PATHS)
async def test_an_empty_file_is_refused_by_a_link_as_inline(
    start_gateway: StartGateway, card: ModelCard, path: str
) -> None:
    async with (
        file_server(sends(b"")) as (url, _),
        start_gateway([FakeEngineClient(card)], **FOLLOWS) as gateway,
    ):
        assert f"at {PLACES[path]} is empty" in await refusal(gateway, path, asking(path, linked(path, url)))
        status, _, answer = await gateway.post(path, asking(path, part_of(path, b"")))
        assert status == 400 and "the document is empty" in answer.decode(), answer


@pytest.mark.parametrize("path", PATHS)
async def test_a_link_that_fails_names_its_place_or_becomes_a_text_in_a_tools_result(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    async with (
        file_server(sends(b"", "404 Not Found")) as (url, _),
        start_gateway([FakeEngineClient(card)], **FOLLOWS) as gateway,
    ):
        message = await refusal(gateway, path, asking(path, linked(path, url)))
        assert f"at {PLACES[path]} cannot be fetched" in message and "status 404" in message
        body = RESULTS[path](WIDE)
        result_parts(path, body)[1] = linked(path, url)
        status, headers, answer = await gateway.post(path, body)
        assert status == 200 and "x-moiety-ignored-fields" in headers, answer


@pytest.mark.parametrize("path", PATHS)
async def test_links_that_lead_elsewhere_or_are_too_many_or_too_large_are_refused(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    image: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": "https://127.0.0.1/a.png"}}
    if path == RESPONSES:
        image = {"type": "input_image", "image_url": "https://127.0.0.1/a.png"}
    engines, small = [FakeEngineClient(seeing)], {"max_document_bytes": 1024}
    async with file_server(sends(b"a" * 2000)) as (url, heads):
        async with start_gateway(engines, max_document_links=2, max_image_links=2, **small) as gateway:
            private = asking(path, linked(path, "https://127.0.0.1/a.pdf"))
            assert "not in the public internet" in await refusal(gateway, path, private)
            assert "its scheme is 'http'" in await refusal(gateway, path, asking(path, linked(path, url)))
            many = [linked(path, f"https://127.0.0.1/{number}.pdf") for number in range(3)]
            message = await refusal(gateway, path, asking(path, *many, image))
            assert "there are 3 links to documents; a request may have 2" in message
            status, _, answer = await gateway.post(path, asking(path, linked(path, "ftp://127.0.0.1/a.pdf")))
            assert status == 400 and "the URL is not a link" in answer.decode()
            assert not heads
        async with start_gateway([FakeEngineClient(seeing)], **small, **FOLLOWS) as gateway:
            assert "more than 1,024 bytes" in await refusal(gateway, path, asking(path, linked(path, url)))


@pytest.mark.parametrize("path", PATHS)
async def test_settings_of_links_to_images_open_nothing_to_links_to_documents(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    async with file_server(sends(b"a secret")) as (url, heads):
        body = asking(path, linked(path, url))
        async with start_gateway([FakeEngineClient(seeing)], **ONLY_IMAGES) as gateway:
            assert "this server follows no links to documents" in await refusal(gateway, path, body)
        async with start_gateway([FakeEngineClient(seeing)], **ONLY_IMAGES, max_document_links=1) as gateway:
            assert "its scheme is 'http'" in await refusal(gateway, path, body)
            private = asking(path, linked(path, url.replace("http:", "https:")))
            assert "not in the public internet" in await refusal(gateway, path, private)
        assert not heads
    async with (
        file_server(sends(WIDE)) as (url, heads),
        start_gateway([FakeEngineClient(seeing)], **FOLLOWS) as gateway,
    ):
        status, _, answer = await gateway.post(path, LINKED[path](url))
        assert status == 400 and "follows no links to images" in answer.decode(), answer
        assert not heads


@pytest.mark.parametrize("path", PATHS)
async def test_links_are_not_followed_to_count_tokens(start_gateway: StartGateway, card: ModelCard, path: str) -> None:
    async with (
        file_server(sends(PAGES)) as (url, heads),
        start_gateway([FakeEngineClient(card)], **FOLLOWS) as gateway,
    ):
        body = {name: value for name, value in asking(path, linked(path, url)).items() if not name.startswith("max_")}
        status, _, answer = await gateway.post(f"{path}/{COUNTS[path]}", body)
        assert status == 400 and "links are not followed to count tokens" in answer.decode(), answer
        assert not heads


async def test_no_link_is_followed_for_a_tenant_whose_quota_is_used_up(limited: Limited) -> None:
    async with file_server(sends(PAGES)) as (url, heads), limited(**FOLLOWS) as gateway:
        await limit(gateway, "tenant", 1, "requests_per_minute")
        assert (await gateway.post(RESPONSES, asking(RESPONSES)))[0] == 200
        status, _, answer = await gateway.post(RESPONSES, asking(RESPONSES, linked(RESPONSES, url)))
        assert status == 429, answer
        assert not heads


async def test_a_stored_response_has_the_link_and_fetches_it_again(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with (
        file_server(sends(PAGES)) as (url, heads),
        start_gateway([FakeEngineClient(card)], **FOLLOWS) as gateway,
    ):
        body = {**asking(RESPONSES, linked(RESPONSES, url)), "store": True}
        status, _, answer = await gateway.post(RESPONSES, body)
        assert status == 200, answer
        response_id = json.loads(answer)["id"]
        (item,) = (await gateway.client.responses.input_items.list(response_id)).data
        assert (item.content[0].file_url, item.content[0].filename) == (url, "a.pdf")
        more = {**asking(RESPONSES), "previous_response_id": response_id}
        status, _, answer = await gateway.post(RESPONSES, more)
        assert status == 200 and len(heads) == 2, answer
        first, second = gateway.engine.submits
        assert len(second.prompt_ids) > len(first.prompt_ids) > len(READ) // 4


async def test_a_link_is_fetched_when_its_request_has_a_process(
    start_gateway: StartGateway, card: ModelCard, until: Callable[[Callable[[], object]], Any]
) -> None:
    limits = {"document_processes": 1, "document_cpu_s": 2.0}
    async with (
        file_server(sends(PAGES)) as (url, heads),
        start_gateway([FakeEngineClient(card)], **limits, **FOLLOWS) as gateway,
    ):
        documents = gateway.assembled.services.documents
        hostile = asyncio.create_task(gateway.post(RESPONSES, asking(RESPONSES, part_of(RESPONSES, endless_pdf()))))
        await until(lambda: documents._slots._num_held)
        waiting = asyncio.create_task(gateway.post(RESPONSES, asking(RESPONSES, linked(RESPONSES, url))))
        await until(lambda: documents._slots._queues or heads)
        assert not heads and not hostile.done()
        assert (await hostile)[0] == 400
        status, _, answer = await waiting
        assert status == 200 and len(heads) == 1, answer
        assert not documents._slots._num_held


async def test_a_client_that_leaves_during_a_fetch_frees_its_process(
    start_gateway: StartGateway, card: ModelCard, until: Callable[[Callable[[], object]], Any]
) -> None:
    async def never(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with (
        file_server(never) as (url, heads),
        start_gateway([FakeEngineClient(card)], document_processes=1, **FOLLOWS) as gateway,
    ):
        documents = gateway.assembled.services.documents
        waiting = asyncio.create_task(gateway.post(RESPONSES, asking(RESPONSES, linked(RESPONSES, url))))
        await until(lambda: heads)
        waiting.cancel()
        await until(lambda: not documents._requests.total() and not documents._slots._num_held)
        status, _, answer = await gateway.post(RESPONSES, asking(RESPONSES, part_of(RESPONSES, PAGES)))
        assert status == 200, answer


@pytest.mark.parametrize("path", PATHS)
async def test_a_fetched_file_is_freed_before_the_next_one(
    start_gateway: StartGateway, seeing: ModelCard, path: str
) -> None:
    card, num_links, num_bytes = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE), 16, 1 << 20
    async with (
        file_server(sends(b"a" * (num_bytes - 1) + b"\xff")) as (url, heads),
        start_gateway([FakeEngineClient(card)], **{**FOLLOWS, "max_document_links": num_links}) as gateway,
    ):
        body = RESULTS[path](WIDE)
        result_parts(path, body)[1:] = [linked(path, f"{url}?{number}") for number in range(num_links)]
        tracemalloc.start()
        try:
            status, _, answer = await gateway.post(path, body)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert status == 400 and b"context_length_exceeded" in answer, "all texts of refusals are in the prompt"
        assert len(heads) == num_links
        assert peak_bytes < num_links * num_bytes / 2


async def test_the_time_of_all_links_of_a_request_is_bounded_and_waits_between_them_are_not_counted() -> None:
    is_open = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await is_open.wait()
        await sends(b"a")(writer)

    limits = LinkLimits(max_document_links=3, timeout_s=0.3)
    fetcher = LinkFetcher(limits=limits, document_reach=AddressPolicy((ip_network("127.0.0.0/8"),)))
    async with file_server(answer) as (url, _), fetcher:
        links = [f"{url}?{number}" for number in range(3)]
        with fetcher.open_links(links, "t", 10, DOCUMENT) as opened:
            with fetcher.open_links(links, "t", 10, DOCUMENT) as other, pytest.raises(CannotFetch):
                await other.fetch(links[0])  # for 0.3 s
            assert other.left_s <= 0
            is_open.set()
            assert await opened.fetch(links[0]) == b"a"
            assert 0 < opened.left_s < limits.timeout_s
            is_open.clear()
            for link in links[1:]:
                with pytest.raises(CannotFetch, match=r"within the 0\.3 s for all linked documents"):
                    await opened.fetch(link)
            assert opened.left_s <= 0
