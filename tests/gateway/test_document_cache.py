"""Cache of the texts of PDF files, and the metrics of documents."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.document_extraction.extractor import DocumentLimits, DocumentRefused, ExtractedText
from moiety_platform.document_extraction.frames import RefusalReason
from moiety_platform.document_extraction.text_cache import ENTRY_BYTES, IDLE_S, DocumentTextCache
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .pdf_files import encrypted_pdf, pdf
from .test_documents import PAGES, asking, part_of, upload, uploaded_part
from .test_images import CHAT
from .test_uploaded_images import PATHS

LIMITS = DocumentLimits()


async def samples(gateway: RunningGateway) -> dict[str, float]:
    """Return the samples of documents of `/metrics`, by name and labels."""
    _, _, answer = await gateway.request("GET", "/metrics")
    lines = (line.rpartition(" ") for line in answer.decode().splitlines() if line.startswith("moiety_document_"))
    return {name: float(value) for name, _, value in lines}


@pytest.mark.parametrize("path", PATHS)
async def test_a_file_is_read_once_for_a_tenant_and_each_salt(gateway: RunningGateway, path: str) -> None:
    file_id = await upload(gateway, PAGES)
    parts = [part_of(path, PAGES), uploaded_part(path, file_id)]
    for body in [asking(path, part) for part in parts * 2]:
        status, _, answer = await gateway.post(path, body)
        assert status == 200, answer
    prompts = [one.prompt_ids for one in gateway.engine.submits]
    assert all(prompt == prompts[0] for prompt in prompts)
    found = await samples(gateway)
    assert (found["moiety_document_cache_hits_total"], found["moiety_document_cache_misses_total"]) == (2, 2)
    assert found['moiety_document_read_seconds_count{kind="pdf"}'] == 2
    assert found['moiety_document_read_seconds_sum{kind="pdf"}'] > 0
    assert found["moiety_document_cache_bytes"] > 2 * len("The sky is green.")
    if path == CHAT:
        await gateway.post(path, {**asking(path, parts[0]), "cache_salt": "another"})
        assert (await samples(gateway))["moiety_document_cache_misses_total"] == 3
    await gateway.client.files.delete(file_id)
    status, _, answer = await gateway.post(path, asking(path, parts[1]))
    assert status == 404, answer


async def test_refusals_are_counted_by_reason_and_found_again(start_gateway: StartGateway, card: ModelCard) -> None:
    limits: dict[str, Any] = {"max_document_pages": 3, "max_document_characters": 200, "max_document_bytes": 40_000}
    cases = {
        "encrypted": encrypted_pdf("secret", "password"),
        "damaged": b"%PDF-1.7 text",
        "no_text": pdf(""),
        "not_text": b"\xff",
        "too_many_pages": pdf(*"abcd"),
        "too_many_characters": b"a" * 300,
        "too_many_bytes": b"a" * 40_001,
    }
    async with start_gateway([FakeEngineClient(card)], **limits) as gateway:
        for data in cases.values():
            answers = [await gateway.post(CHAT, asking(CHAT, part_of(CHAT, data))) for _ in range(2)]
            assert [status for status, _, _ in answers] == [400, 400]
            assert answers[0][2] == answers[1][2]
        found = await samples(gateway)
        for reason in RefusalReason:
            count = found[f'moiety_document_refusals_total{{reason="{reason.value}"}}']
            assert count == 2 * (reason.value in cases), reason
        assert found["moiety_document_cache_hits_total"] == 4
        assert found["moiety_document_requests"] == 0


async def test_without_a_cache_each_request_reads_its_file(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], document_cache_bytes=0) as gateway:
        for _ in range(2):
            await gateway.post(CHAT, asking(CHAT, part_of(CHAT, PAGES)))
        found = await samples(gateway)
        assert found['moiety_document_read_seconds_count{kind="pdf"}'] == 2
        assert found["moiety_document_cache_bytes"] == found["moiety_document_cache_hits_total"] == 0


def test_an_entry_is_found_by_its_tenant_within_its_limits_only() -> None:
    cache = DocumentTextCache(1 << 20)
    cache.put("a", b"1", ExtractedText("four", 2), LIMITS)
    assert cache.find("a", b"1", LIMITS) == ExtractedText("four", 2)
    assert cache.find("b", b"1", LIMITS) is None and cache.find("a", b"2", LIMITS) is None
    assert cache.find("a", b"1", dataclasses.replace(LIMITS, max_pages=1)) is None
    assert cache.find("a", b"1", dataclasses.replace(LIMITS, max_characters=3)) is None
    cache.put("a", b"1", DocumentRefused("is bad", RefusalReason.DAMAGED), LIMITS)
    with pytest.raises(DocumentRefused, match="is bad"):
        cache.find("a", b"1", LIMITS)
    assert cache.find("a", b"1", dataclasses.replace(LIMITS, cpu_s=1.0)) is None
    cache.forget_tenants(["a", "b"])
    assert cache.find("a", b"1", LIMITS) is None and cache.num_bytes == 0


def test_a_tenant_with_many_files_evicts_its_own() -> None:
    cache = DocumentTextCache(10 * (ENTRY_BYTES + 1000))
    cache.put("small", b"1", ExtractedText("a" * 900, 1), LIMITS)
    for number in range(100):
        cache.put("large", number.to_bytes(), ExtractedText("a" * 900, 1), LIMITS)
    assert cache.find("small", b"1", LIMITS) is not None
    assert cache.find("large", b"\0", LIMITS) is None and cache.find("large", (99).to_bytes(), LIMITS) is not None


class CountingId(str):
    """A tenant's id that counts how often it is hashed or compared."""

    num_uses = 0

    def __hash__(self) -> int:
        CountingId.num_uses += 1
        return super().__hash__()

    def __lt__(self, other: str) -> bool:
        CountingId.num_uses += 1
        return super().__lt__(other)


def test_texts_that_nobody_uses_leave_room_for_those_of_a_tenant_with_more() -> None:
    now_s = 0.0
    cache = DocumentTextCache(20 * (ENTRY_BYTES + 1000), monotonic=lambda: now_s)
    for number in range(20):
        cache.put(f"small {number}", b"1", ExtractedText("a" * 900, 1), LIMITS)
    large = ExtractedText("a" * 5000, 1)
    cache.put("large", b"1", large, LIMITS)
    assert cache.find("large", b"1", LIMITS) is None, "its share is less while the others use theirs"
    now_s = IDLE_S - 1
    assert cache.find("small 0", b"1", LIMITS) is not None
    now_s = IDLE_S
    cache.put("large", b"1", large, LIMITS)
    assert cache.find("large", b"1", LIMITS) == large
    found = [number for number in range(20) if cache.find(f"small {number}", b"1", LIMITS) is not None]
    assert found[0] == 0 and found[1:] == list(range(21 - len(found), 20)), "evicted in the order of their last use"
    assert len(found) > 10


def test_an_eviction_does_not_look_at_every_tenant() -> None:
    num_tenants = 1024
    cache = DocumentTextCache(num_tenants * (ENTRY_BYTES + 1000))
    for number in range(num_tenants):
        cache.put(CountingId(number), b"1", ExtractedText("a" * 900, 1), LIMITS)
    assert cache.num_bytes > cache.max_bytes - num_tenants * 100
    CountingId.num_uses = 0
    cache.max_bytes //= 2
    assert 0 < CountingId.num_uses < 64 * num_tenants / 2
    CountingId.num_uses = 0
    cache.max_bytes = 0
    assert CountingId.num_uses == 0 and cache.num_bytes == 0
    cache.max_bytes = 1 << 20
    assert cache.find(str(num_tenants - 1), b"1", LIMITS) is None
    cache.put("a", b"1", ExtractedText("a", 1), LIMITS)
    assert cache.find("a", b"1", LIMITS) is not None


def test_the_order_of_sizes_takes_no_more_memory_than_the_tenants() -> None:
    cache = DocumentTextCache(1 << 20)
    for number in range(2000):
        cache.put("abc"[number % 3], bytes([number % 7]), ExtractedText("a" * number, 1), LIMITS)
    assert len(cache._largest) <= 2 * 3 + 64


PUTS = st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 3000), st.sampled_from([0.0, IDLE_S / 2]))


@given(st.lists(PUTS, max_size=40), st.integers(0, 12_000), st.integers(0, 12_000))
def test_no_more_is_cached_than_allowed_and_sizes_are_conserved(
    puts: list[tuple[str, int, int, float]], max_bytes: int, fewer_bytes: int
) -> None:
    now_s = 0.0
    cache = DocumentTextCache(max_bytes, monotonic=lambda: now_s)
    for tenant_id, number, size, waited_s in puts:
        now_s += waited_s
        cache.put(tenant_id, bytes([number]), ExtractedText("a" * size, 1), LIMITS)
        assert 0 <= cache.num_bytes <= max_bytes
    cache.max_bytes = fewer_bytes
    assert 0 <= cache.num_bytes <= fewer_bytes
    cache.forget_tenants("abc")
    assert cache.num_bytes == 0
