"""Links to images: what is fetched, what is not, and how a tenant's fetches are bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import httpx
import msgspec
import pytest

from moiety_platform.bootstrap.image_preparation import link_fetcher_of
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import RateLimited
from moiety_platform.inference import link_fetcher
from moiety_platform.inference.link_fetcher import DOCUMENT, IMAGE, CannotFetch, LinkedKind, LinkFetcher, LinkLimits
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.webhooks.addresses import Address, AddressPolicy, LookupName
from moiety_wire.messages import ModelCard

from .conftest import StartGateway
from .test_images import CHAT, LINKED, MESSAGES, REPLACED, RESPONSES, RESULTS, TALL, TOOL_TEMPLATE, WIDE

MAX_BYTES, MAX_TOTAL_BYTES = 1_000, 1_500
LOOPBACK = AddressPolicy((ip_network("127.0.0.0/8"),))
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def sends(body: bytes, status: str = "200 OK", headers: str = "") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)
        await writer.drain()

    return answer


@asynccontextmanager
async def file_server(answer: Answer) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve every path with the answer. Yields the URL of an image, and the heads of the requests."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await answer(writer)
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/a.png", heads


async def fetched(fetcher: LinkFetcher, *links: str, tenant_id: str = "t") -> dict[str, bytes | CannotFetch]:
    async with fetcher:
        return await fetcher.fetch_all(links, tenant_id, MAX_BYTES, MAX_TOTAL_BYTES)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_linked_image_reaches_the_engine_as_a_file(
    start_gateway: StartGateway,
    seeing: ModelCard,
    path: str,
) -> None:
    async with file_server(sends(TALL)) as (url, heads):
        limits = {"max_image_links": 2, "image_link_networks": ("127.0.0.0/8",)}
        async with start_gateway([FakeEngineClient(seeing)], **limits) as gateway:
            status, _, answer = await gateway.post(path, LINKED[path](url))
            assert status == 200, answer
            (submit,) = gateway.engine.submits
            assert [image.data for image in submit.images] == [TALL]
            assert len(heads) == 1 and b"authorization" not in heads[0].lower()


async def test_a_link_that_fails_names_its_place_or_becomes_a_text_in_a_tools_result(
    start_gateway: StartGateway,
    seeing: ModelCard,
) -> None:
    card = msgspec.structs.replace(seeing, chat_template=TOOL_TEMPLATE)
    async with file_server(sends(b"", "404 Not Found")) as (url, _):
        limits = {"max_image_links": 2, "image_link_networks": ("127.0.0.0/8",)}
        async with start_gateway([FakeEngineClient(card)], **limits) as gateway:
            status, _, answer = await gateway.post(CHAT, LINKED[CHAT](url))
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (400, "invalid_image")
            assert "messages.0.content.0.image_url" in error["message"] and "status 404" in error["message"]
            body = RESULTS[CHAT](WIDE)
            body["messages"][2]["content"][1]["image_url"]["url"] = url
            status, headers, answer = await gateway.post(CHAT, body)
            assert status == 200, answer
            assert headers["x-moiety-ignored-fields"] == REPLACED[CHAT]


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("http://example.com/a.png", "its scheme is 'http'"),
        ("https://127.0.0.1/a.png", "not in the public internet"),
        ("https://127.1/a.png", "not in the public internet"),
        ("https://2130706433/a.png", "not in the public internet"),
        ("https://[::1]/a.png", "not in the public internet"),
        ("https://[::ffff:10.0.0.1]/a.png", "not in the public internet"),
        ("https://169.254.169.254/latest/meta-data", "not in the public internet"),
        ("https://localhost/a.png", "not in the public internet"),
        ("https://user:secret@example.com/a.png", "no user or password"),
        ("https://no-such-name.invalid/a.png", "is not known"),
        ("https://exa mple/\x7f", ""),
        ("https://127.0.0.1:99999/a.png", "port must be from 1 to 65535"),
        ("https://example.com:99999/a.png", "port must be from 1 to 65535"),
        ("https://example.com:0/a.png", "port must be from 1 to 65535"),
    ],
)
async def test_a_link_may_lead_to_the_public_internet_only(link: str, words: str) -> None:
    found = (await fetched(LinkFetcher(limits=LinkLimits(4)), link))[link]
    assert isinstance(found, CannotFetch)
    assert words in str(found)


async def test_an_error_of_the_socket_is_the_links() -> None:
    class Broken(AddressPolicy):
        async def resolve(self, url: httpx.URL, lookup: LookupName | None = None) -> Address:
            raise OverflowError(url.host)

    url = "https://example.com/a.png"
    found = (await fetched(LinkFetcher(Broken(), LinkLimits(4)), url))[url]
    assert "cannot be reached" in str(found)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sends(b"", "302 Found", "Location: http://169.254.169.254/\r\n"), "redirects are not followed"),
        (sends(b"", "500 Oh"), "status 500"),
        (sends(bytes(MAX_BYTES + 1)), "more than 1,000 bytes"),
        (sends(b"x", headers="Content-Encoding: gzip\r\n"), "compressed"),
    ],
)
async def test_an_answer_that_is_no_file_within_the_limits_is_refused(answer: Answer, words: str) -> None:
    async with file_server(answer) as (url, _):
        found = (await fetched(LinkFetcher(LOOPBACK, LinkLimits(4)), url))[url]
    assert isinstance(found, CannotFetch)
    assert words in str(found)


async def test_the_bytes_and_the_number_of_all_links_are_bounded() -> None:
    async with file_server(sends(bytes(MAX_BYTES))) as (url, heads):
        links = [f"{url}?{number}" for number in range(3)]
        found = await fetched(LinkFetcher(LOOPBACK, LinkLimits(4)), *links)
        refused = [one for one in found.values() if isinstance(one, CannotFetch)]
        assert refused and all("too many bytes together" in str(one) for one in refused)
        num_asked = len(heads)
        found = await fetched(LinkFetcher(LOOPBACK, LinkLimits(2)), *links)
        assert all("a request may have 2" in str(one) for one in found.values())
        assert len(heads) == num_asked


async def test_a_host_that_never_ends_costs_a_bounded_time() -> None:
    async def never(_: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with file_server(never) as (url, _):
        found = (await fetched(LinkFetcher(LOOPBACK, LinkLimits(4, timeout_s=0.2)), url))[url]
    assert "did not send it within 0.2 s" in str(found)


async def test_one_tenants_slow_links_leave_room_for_another() -> None:
    is_open, two_wait = asyncio.Event(), asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        if len(slow_heads) == 2:
            two_wait.set()
        await is_open.wait()
        await sends(WIDE)(writer)

    fetcher = LinkFetcher(LOOPBACK, LinkLimits(8, max_per_tenant=2))
    async with file_server(slow) as (slow_url, slow_heads), file_server(sends(TALL)) as (url, _), fetcher:
        links = [f"{slow_url}?{number}" for number in range(5)]
        waiting = asyncio.create_task(fetcher.fetch_all(links, "greedy", MAX_BYTES, MAX_TOTAL_BYTES))
        await two_wait.wait()
        assert await fetcher.fetch_all([url], "other", MAX_BYTES, MAX_TOTAL_BYTES) == {url: TALL}
        assert len(slow_heads) == 2
        is_open.set()
        assert set((await waiting).values()) == {WIDE}


async def test_a_name_whose_server_is_silent_keeps_its_slot_until_the_look_up_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_answered, look_up, asked = threading.Event(), socket.getaddrinfo, list[threading.Thread]()

    def look_up_slowly(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "silent.example":
            return look_up(host, *args, **kwargs)
        asked.append(threading.current_thread())
        is_answered.wait(20)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
    limits = LinkLimits(4, timeout_s=0.3, max_per_tenant=1)
    async with file_server(sends(TALL)) as (url, _), LinkFetcher(LOOPBACK, limits) as fetcher:
        silent = "http://silent.example/a.png"
        for _ in range(2):
            found = await fetcher.fetch_all([silent], "greedy", MAX_BYTES, MAX_TOTAL_BYTES)
            assert "did not send it within 0.3 s" in str(found[silent])
        assert [thread.name.rpartition("_")[0] for thread in asked] == ["image-link-name"]
        assert await fetcher.fetch_all([url], "other", MAX_BYTES, MAX_TOTAL_BYTES) == {url: TALL}
        is_answered.set()
        fetcher.limits = LinkLimits(4, max_per_tenant=1)
        assert await fetcher.fetch_all([url], "greedy", MAX_BYTES, MAX_TOTAL_BYTES) == {url: TALL}


async def test_tenants_whose_names_are_never_found_leave_look_ups_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    is_answered, look_up = threading.Event(), socket.getaddrinfo

    def look_up_slowly(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "silent.example":
            is_answered.wait(20)
        return look_up("127.0.0.1", *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
    monkeypatch.setattr(link_fetcher, "MAX_LOOKUPS", 8)
    async with file_server(sends(TALL)) as (url, _), LinkFetcher(LOOPBACK, LinkLimits(4, timeout_s=0.2)) as fetcher:
        silent = [f"http://silent.example/{number}.png" for number in range(4)]
        for tenant_id in ("greedy", "greedier"):
            await fetcher.fetch_all(silent, tenant_id, MAX_BYTES, MAX_TOTAL_BYTES)
        fetcher.limits = LinkLimits(4)
        for tenant_id in ("other", "another"):
            assert await fetcher.fetch_all([url], tenant_id, MAX_BYTES, MAX_TOTAL_BYTES) == {url: TALL}
        is_answered.set()


async def test_the_requests_of_a_tenant_that_wait_for_links_are_bounded() -> None:
    is_open, one_waits = asyncio.Event(), asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        one_waits.set()
        await is_open.wait()
        await sends(WIDE)(writer)

    fetcher = LinkFetcher(LOOPBACK, LinkLimits(8, max_requests_per_tenant=1))
    async with file_server(slow) as (url, heads), fetcher:
        waiting = asyncio.create_task(fetcher.fetch_all([url], "greedy", MAX_BYTES, MAX_TOTAL_BYTES))
        await one_waits.wait()
        with pytest.raises(RateLimited) as caught:
            await fetcher.fetch_all([url], "greedy", MAX_BYTES, MAX_TOTAL_BYTES)
        assert caught.value.retry_after_s
        assert await fetcher.fetch_all([], "greedy", MAX_BYTES, MAX_TOTAL_BYTES) == {}
        assert len(heads) == 1
        is_open.set()
        assert await waiting == {url: WIDE}
        assert await fetcher.fetch_all([url], "greedy", MAX_BYTES, MAX_TOTAL_BYTES) == {url: WIDE}


@pytest.mark.parametrize(("path", "count"), [(MESSAGES, "count_tokens"), (RESPONSES, "input_tokens")])
async def test_links_are_not_followed_to_count_tokens(
    start_gateway: StartGateway, seeing: ModelCard, path: str, count: str
) -> None:
    async with file_server(sends(TALL)) as (url, heads):
        limits = {"max_image_links": 2, "image_link_networks": ("127.0.0.0/8",)}
        async with start_gateway([FakeEngineClient(seeing)], **limits) as gateway:
            body = {name: value for name, value in LINKED[path](url).items() if not name.startswith("max_")}
            status, _, answer = await gateway.post(f"{path}/{count}", body)
            error = json.loads(answer)["error"]
            assert status == 400, answer
            assert "send the image itself" in error["message"]
        assert not heads


@pytest.mark.parametrize("kind", [IMAGE, DOCUMENT])
async def test_the_settings_of_links_are_reloaded(kind: LinkedKind) -> None:
    live = LiveSettings(GatewaySettings())
    fetcher = link_fetcher_of(live.now, live)
    async with file_server(sends(WIDE)) as (url, _), fetcher:
        for settings, words in (
            ({}, f"follows no links to {kind.noun}s"),
            ({f"max_{kind.noun}_links": 1}, "its scheme is 'http'"),
            ({f"max_{kind.noun}_links": 1, f"{kind.noun}_link_networks": "127.0.0.0/8"}, ""),
        ):
            await live.change(GatewaySettings(**settings))
            found = (await fetcher.fetch_all([url], "t", MAX_BYTES, MAX_TOTAL_BYTES, kind))[url]
            assert words in str(found)
        assert found == WIDE
        await live.change(GatewaySettings(max_image_link_requests_per_tenant=5))
        assert fetcher.limits.max_requests_per_tenant == 5
