"""`/v1/files` with the real `openai` package, and with what no good client sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai.types import Batch
from sqlalchemy import func, select

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import InsufficientStorage, Unavailable
from moiety_platform.files.models import StoredFile
from moiety_platform.object_storage.store import PIECE_BYTES
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway, Until

DEADLINE_S = 60.0
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "tiny", "prompt": "x", "max_tokens": 2},
}


async def upload(gateway: RunningGateway, content: bytes = b"{}\n", name: str = "in.jsonl", **more: Any) -> Any:
    return await gateway.client.files.create(file=(name, content), purpose="batch", **more)


async def num_stored(gateway: RunningGateway) -> list[Any]:
    """Return the number of rows and of objects."""
    async with gateway.database.read() as session:
        num_rows = await session.scalar(select(func.count()).select_from(StoredFile))
    return [num_rows, sum([len(page) async for page in gateway.objects.list_pages("files/")])]


async def wait_bytes(gateway: RunningGateway, num_bytes: int) -> None:
    """Wait until this many bytes of the only file have been counted."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with gateway.database.read() as session:
                if (await session.scalar(select(StoredFile.num_bytes)) or 0) >= num_bytes:
                    return
            await asyncio.sleep(0.02)


async def state_of_the_only(gateway: RunningGateway) -> Any:
    async with gateway.database.read() as session:
        return await session.scalar(select(StoredFile.state))


def form(*parts: Any, boundary: str = "b") -> tuple[Any, ...]:
    """Return the body of a multipart form, and its headers."""
    body = b"".join(b"--%b\r\n%b\r\n" % (boundary.encode(), part) for part in parts) + f"--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def field(name: str, value: Any, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}'.encode()


async def test_a_file_is_uploaded_listed_fetched_and_deleted(gateway: RunningGateway) -> None:
    content = bytes(range(256)) * (PIECE_BYTES // 128) + b"and a little more"  # in three pieces
    file = await upload(gateway, content, "some/where/tü\nx.jsonl")
    assert (file.object, file.bytes, file.purpose, file.status) == ("file", len(content), "batch", "processed")
    assert file.filename == "tü_x.jsonl"
    assert (await gateway.client.files.content(file.id)).read() == content
    assert (await gateway.client.files.retrieve(file.id)) == file
    others = [await upload(gateway, b"x") for _ in range(4)]
    ids = [one.id async for one in gateway.client.files.list(limit=2, order="asc")]
    assert sorted(ids) == sorted([file.id, *(other.id for other in others)])
    assert ids[::-1] == [one.id async for one in gateway.client.files.list(limit=3)]
    assert (await gateway.client.files.list(purpose="batch_output")).data == []
    assert (await gateway.client.files.delete(file.id)).deleted
    for call in (gateway.client.files.retrieve, gateway.client.files.content, gateway.client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)


async def test_a_file_that_a_batch_reads_is_not_deleted_before_its_end(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        engine.die()
        file = await upload(gateway, json.dumps(LINE).encode())
        batch = await gateway.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        with pytest.raises(openai.ConflictError, match=batch.id) as caught:
            await gateway.client.files.delete(file.id)
        assert caught.value.code == "file_in_use"
        await engine.start()
        async with asyncio.timeout(DEADLINE_S):
            while batch.status != "completed":
                batch = await gateway.client.batches.retrieve(batch.id)
        assert (await gateway.client.files.delete(file.id)).deleted
        output = await gateway.client.files.retrieve(batch.output_file_id)
        content = (await gateway.client.files.content(batch.output_file_id)).read()
        assert (output.purpose, output.bytes) == ("batch_output", len(content))
        assert (await gateway.client.files.delete(output.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await gateway.client.files.content(output.id)
        with pytest.raises(openai.NotFoundError):
            await gateway.client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )


async def test_a_file_that_expires_is_gone_and_its_content_erased(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        expiring = await upload(gateway, expires_after={"anchor": "created_at", "seconds": 3600})
        assert expiring.expires_at == expiring.created_at + 3600
        kept = await upload(gateway)
        assert kept.expires_at == kept.created_at + 30 * 86_400
        gateway.store_clock.ahead_ms = 3_600_001
        assert [one.id async for one in gateway.client.files.list()] == [kept.id]
        assert (await gateway.retention.round())["files"] == 1
        assert await num_stored(gateway) == [1, 1]
        async with start_gateway([FakeEngineClient(card)], beside=gateway, keep_files_days=0) as other:
            assert (await upload(other)).expires_at is None


async def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_file_bytes=PIECE_BYTES + 1000) as gateway:
        assert (await upload(gateway, b"x" * (PIECE_BYTES + 1000))).bytes == PIECE_BYTES + 1000
        for size in (PIECE_BYTES + 1001, 2 * PIECE_BYTES):
            with pytest.raises(openai.APIStatusError, match="larger than") as caught:
                await upload(gateway, b"x" * size)
            assert caught.value.status_code == 413
        assert len((await gateway.client.files.list()).data) == 1


async def test_a_tenants_files_have_a_bound_together(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], max_file_bytes_per_tenant=2500) as gateway:
        first = await upload(gateway, b"x" * 1500)
        with pytest.raises(openai.APIStatusError, match="together") as caught:
            await upload(gateway, b"x" * 1500)
        assert (caught.value.status_code, caught.value.code) == (413, "file_storage_full")
        await gateway.client.files.delete(first.id)
        await upload(gateway, b"x" * 1500)


FILE = field("file", "{}", '; filename="f"')
PURPOSE = field("purpose", "batch")


@pytest.mark.parametrize(
    ("body", "headers", "word"),
    [
        (b"", {}, "form"),
        (b"{}", {"Content-Type": "application/json"}, "form"),
        (b"x", {"Content-Type": "multipart/form-data"}, "form"),
        (b"--b", {"Content-Type": "multipart/form-data; boundary=b"}, "ends in the middle"),
        (form(PURPOSE, FILE)[0][:-8], form()[1], "ends in the middle"),
        (*form(PURPOSE), "'file' is missing"),
        (*form(FILE), "'purpose' is missing"),
        (*form(PURPOSE, FILE, FILE), "two files"),
        (*form(FILE, field("purpose", "fine-tune")), "must be 'batch' for requests"),
        (*form(PURPOSE, field("file", "", '; filename="f"')), "empty"),
        (*form(field("purpose", "x" * 5000), FILE), "1024 bytes"),
        (*form(PURPOSE, field("expires_after[seconds]", "7"), FILE), "anchor"),
        (*form(PURPOSE, *[field(f"f{n}", "x") for n in range(40)]), "form"),
        (*form(b"no header at all"), "form"),
    ],
)
async def test_an_invalid_form_body_is_refused_with_the_expected_fields(
    gateway: RunningGateway, body: Any, headers: Any, word: Any
) -> None:
    status, _, answer = await gateway.request("POST", "/v1/files", body, headers=headers)
    assert status == 400, answer
    assert word in json.loads(answer)["error"]["message"]
    assert (await gateway.client.files.list()).data == []


async def test_a_form_may_have_its_fields_in_any_order(gateway: RunningGateway) -> None:
    body, headers = form(FILE, field("unknown", "x"), PURPOSE)
    status, _, answer = await gateway.request("POST", "/v1/files", body, headers=headers)
    assert (status, json.loads(answer)["bytes"]) == (200, 2)


async def test_a_client_that_leaves_in_the_middle_leaves_nothing_to_be_seen(
    gateway: RunningGateway, until: Until
) -> None:
    _, writer = await asyncio.open_connection(*gateway.address)
    head = f"POST /v1/files HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: 10000000\r\n"
    body, headers = form(PURPOSE, field("file", "x" * 2 * PIECE_BYTES, '; filename="f"'))
    writer.write(head.encode() + f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body[:-100])
    await wait_bytes(gateway, PIECE_BYTES)
    writer.transport.abort()
    await until(lambda: gateway.num_connections() == 0)
    assert (await gateway.client.files.list()).data == []
    async with asyncio.timeout(DEADLINE_S):  # whoever writes the file learns of it after the server
        while await state_of_the_only(gateway) != "deleted":  # noqa: ASYNC110 - the store announces no change
            await asyncio.sleep(0.02)


async def refuse() -> None:
    raise Unavailable(
        "the object store is not available; try again shortly", code="object_store_unavailable", retry_after_s=1
    )


async def fill_up() -> None:
    raise InsufficientStorage("there is no space left", code="object_store_full")


@pytest.mark.parametrize(
    ("guard", "status", "code"), [(refuse, 503, "object_store_unavailable"), (fill_up, 507, "object_store_full")]
)
async def test_a_failing_object_store_is_reported_and_no_byte_is_counted(
    start_gateway: StartGateway, card: ModelCard, guard: Callable[[], Awaitable[None]], status: int, code: str
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_file_bytes_per_tenant=2500) as gateway:
        gateway.objects.guard = guard
        for _ in range(3):
            with pytest.raises(openai.APIStatusError) as caught:
                await upload(gateway, b"x" * 2000)
            assert (caught.value.status_code, caught.value.code) == (status, code)
        gateway.objects.guard = None
        assert (await gateway.client.files.list()).data == []
        assert (await upload(gateway, b"x" * 2000)).bytes == 2000


async def test_a_download_fails_before_it_begins_where_the_content_cannot_be_had(gateway: RunningGateway) -> None:
    file = await upload(gateway)
    await gateway.client.files.content(file.id)
    gateway.objects.guard = refuse
    with pytest.raises(openai.APIStatusError) as caught:
        await gateway.client.files.content(file.id)
    assert caught.value.status_code == 503
    gateway.objects.guard = None
    assert await gateway.objects.delete_some("files/") == 1
    with pytest.raises(openai.APIStatusError) as caught:
        await gateway.client.files.content(file.id)
    assert (caught.value.status_code, caught.value.code) == (410, "file_content_missing")


async def test_a_batch_waits_for_an_object_store_that_is_away_and_is_answered_once(
    gateway: RunningGateway, until: Until
) -> None:
    num_asked = 0

    async def count_and_refuse() -> None:
        nonlocal num_asked
        num_asked += 1
        await refuse()

    file = await upload(gateway, json.dumps(LINE).encode())
    gateway.objects.guard = count_and_refuse
    batch = await submit_batch(gateway, file.id)
    await until(lambda: num_asked >= 1)
    gateway.objects.guard = None
    gateway.store_clock.ahead_ms = 61_000  # past the lease of the validation that could not read
    done = await ended(gateway, batch)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 0)


async def test_a_batch_whose_input_is_lost_fails_with_the_reason(gateway: RunningGateway) -> None:
    file = await upload(gateway, json.dumps(LINE).encode())
    await gateway.objects.delete_some("files/")
    failed = await ended(gateway, await submit_batch(gateway, file.id))
    assert (failed.status, failed.errors.data[0].code) == ("failed", "file_content_missing")


async def submit_batch(gateway: RunningGateway, file_id: str) -> Batch:
    return await gateway.client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    )


async def ended(gateway: RunningGateway, batch: Batch) -> Batch:
    async with asyncio.timeout(DEADLINE_S):
        while batch.status not in ("completed", "failed"):
            await asyncio.sleep(0.02)
            batch = await gateway.client.batches.retrieve(batch.id)
    return batch
