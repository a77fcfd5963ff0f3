"""Contents of requests: of tenants that opted in, redacted, encrypted, bound to their rows, and deleted in time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import BigInteger, cast, func, literal, select, update

from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.clock import ManualClock
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.guardrails.detectors import find, redact
from moiety_platform.guardrails.terms import Detector
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.models import RequestContent
from moiety_platform.request_contents.opted_in import load_terms
from moiety_platform.request_contents.redaction import ContentRedactor
from moiety_platform.request_contents.service import end_logging, purge_contents, read_content, set_logging
from moiety_platform.request_contents.terms import MAX_CHARS, CapturedContent, Content, ContentTerms
from moiety_platform.request_contents.writer import MAX_QUEUED_CHARS, ContentWriter
from moiety_platform.webhooks.addresses import AddressPolicy

from .conftest import PEPPER, Demo

CARD = "4111 1111 1111 1111"
SECRET = "sk-" + "a1B2" * 8
PRIVATE = f"-----BEGIN RSA PRIVATE KEY-----\n{'MIIEow' * 20}\n-----END RSA PRIVATE KEY-----"
START_MS, DAY_MS = 1_700_000_000_000, 24 * 3600 * 1000
CIPHER = ContentCipher(PEPPER)


class Clock:
    """A database clock that a test sets."""

    def __init__(self) -> None:
        self.ms = START_MS

    def __call__(self) -> Any:
        return cast(literal(self.ms), BigInteger)


def captured(
    tenant_id: str, given_text: str, *answers: str, keep_days: int = 3, opt_in_id: str = "opt_1"
) -> CapturedContent:
    content = CapturedContent(ContentTerms(tenant_id, keep_days, opt_in_id), given_text)
    for index, answer in enumerate(answers):
        for start in range(0, len(answer), 7):
            content.add(index, answer[start : start + 7])
    return content


def writer_of(database: Database, now: Any = now_ms) -> ContentWriter:
    return ContentWriter(database, CIPHER, ContentRedactor(AddressPolicy()), now=now)


async def opt_in(database: Database, demo: Demo, clock: ManualClock, keep_days: int = 3) -> str:
    """Let the tenant opt in; return the id of the opt-in, as requests that begin then have it."""
    async with database.write() as session:
        await set_logging(session, demo.tenant_id, keep_days, clock.now())
        (terms,) = await load_terms(session)
    return terms.opt_in_id


async def stored(database: Database, demo: Demo, clock: ManualClock, now: Clock, keep_days: int = 3) -> None:
    """Let the tenant opt in, and store the content of its request r1."""
    terms: dict[str, Any] = {"keep_days": keep_days, "opt_in_id": await opt_in(database, demo, clock, keep_days)}
    writer = writer_of(database, now)
    writer.put("r1", captured(demo.tenant_id, f"my card is {CARD}", f"keep {SECRET} safe", "2nd", **terms))
    await writer.write_queued()


async def num_stored(database: Database) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(RequestContent)) or 0


async def test_a_content_is_stored_redacted_and_encrypted_and_read_again(
    database: Database, demo: Demo, clock: ManualClock
) -> None:
    now = Clock()
    await stored(database, demo, clock, now)
    async with database.read() as session:
        sealed = (await session.scalars(select(RequestContent))).one().sealed
        view = await read_content(session, CIPHER, "r1", now)
    assert (view.input, view.outputs) == (
        "my card is [redacted: card numbers]", ["keep [redacted: secrets] safe", "2nd"],
    )  # fmt: skip
    assert not view.is_cut
    assert view.expires_at == datetime.fromtimestamp((START_MS + 3 * DAY_MS) / 1000, UTC)
    assert b"card" not in sealed and b"keep" not in sealed and b"2nd" not in sealed


async def test_contents_of_tenants_that_did_not_opt_in_are_not_stored(
    database: Database, demo: Demo, clock: ManualClock
) -> None:
    now = Clock()
    writer = writer_of(database, now)
    writer.put("r1", captured(demo.tenant_id, "text"))
    await writer.write_queued()
    assert await num_stored(database) == 0, "it opted out between the request's beginning and its end"
    await stored(database, demo, clock, now)
    async with database.write() as session:
        await end_logging(session, demo.tenant_id)
        with pytest.raises(NotFound, match="not opted in"):
            await read_content(session, CIPHER, "r1", now)
        assert await purge_contents(session, now) == 1


async def test_contents_of_an_ended_opt_in_cannot_be_read_after_another_one(
    database: Database, second: Database, demo: Demo, clock: ManualClock
) -> None:
    now = Clock()
    await stored(database, demo, clock, now)
    first = await opt_in(database, demo, clock, keep_days=5)  # another time of storage, and the same opt-in
    async with database.write() as session:
        assert (await read_content(session, CIPHER, "r1", now)).outputs[1] == "2nd"
        assert await purge_contents(session, now) == 0
        await end_logging(session, demo.tenant_id)
    again = await opt_in(database, demo, clock)
    assert again != first
    writer = writer_of(second, now)  # of a gateway where a request of before ends now
    for number, opt_in_id in enumerate((first, again), start=2):
        writer.put(f"r{number}", captured(demo.tenant_id, "text", opt_in_id=opt_in_id))
    await writer.write_queued()
    assert await num_stored(database) == 2, "r2 began under the ended opt-in"
    async with database.write() as session:
        for request_id in ("r1", "r2"):
            with pytest.raises(NotFound):
                await read_content(session, CIPHER, request_id, now)
        assert await purge_contents(session, now) == 1
        assert (await read_content(session, CIPHER, "r3", now)).input == "text"


async def test_a_content_expires_after_the_days_of_its_tenant(
    database: Database, demo: Demo, clock: ManualClock
) -> None:
    now = Clock()
    await stored(database, demo, clock, now, keep_days=2)
    now.ms += 2 * DAY_MS - 1
    async with database.write() as session:
        assert await purge_contents(session, now) == 0
        assert (await read_content(session, CIPHER, "r1", now)).outputs[1] == "2nd"
    now.ms += 1
    async with database.write() as session:
        with pytest.raises(NotFound, match="expired"):
            await read_content(session, CIPHER, "r1", now)
        assert await purge_contents(session, now) == 1
    assert await num_stored(database) == 0


async def test_a_content_is_bound_to_its_request_and_tenant(database: Database, demo: Demo, clock: ManualClock) -> None:
    now = Clock()
    await stored(database, demo, clock, now)
    async with database.write() as session:
        await session.execute(update(RequestContent).values(request_id="r2"))
    async with database.read() as session:
        with pytest.raises(NotFound):
            await read_content(session, CIPHER, "r2", now)
    for wrong in (0, 91, -1):
        async with database.write() as session:
            with pytest.raises(BadRequest, match="keep_days"):
                await set_logging(session, demo.tenant_id, wrong, clock.now())


TEXTS = st.text(max_size=50)


@given(TEXTS, st.lists(TEXTS, max_size=3), TEXTS, TEXTS)
def test_what_is_encrypted_is_read_by_the_same_pepper_only(
    given_text: str, outputs: list[str], tenant_id: str, request_id: str
) -> None:
    content = Content(given_text, outputs, is_cut=False)
    other = b"another pepper, of 32 or more bytes"
    try:
        sealed = CIPHER.encrypt(tenant_id, request_id, content)
    except UnicodeEncodeError:
        return  # a lone surrogate, which no client can send
    assert CIPHER.decrypt(tenant_id, request_id, sealed) == content
    assert CIPHER.decrypt(tenant_id + "x", request_id, sealed) is None
    assert CIPHER.decrypt(tenant_id, request_id + "x", sealed) is None
    assert CIPHER.decrypt(tenant_id, request_id, sealed[:-1]) is None
    assert ContentCipher(other).decrypt(tenant_id, request_id, sealed) is None
    turned = ContentCipher(other, PepperRotation(previous=PEPPER))
    assert turned.decrypt(tenant_id, request_id, sealed) == content


@given(st.lists(st.sampled_from([CARD, SECRET, PRIVATE, "5500-0000-0000-0004", "hello", " 12 ", "x"]), max_size=8))
def test_nothing_that_detectors_find_is_left_in_redacted_text(parts: list[str]) -> None:
    text = redact("\n".join(parts))
    assert find(text, Detector) is None
    assert text.count("hello") == parts.count("hello")
    assert "MIIEow" not in text, "a private key goes to its end"


def test_long_contents_are_cut() -> None:
    content = captured("t", "a" * (MAX_CHARS + 1), "b" * (MAX_CHARS - 3), "cccc")
    cut = content.content()
    assert len(cut.input) == MAX_CHARS and cut.outputs[1] == "ccc" and cut.is_cut
    assert not captured("t", "a" * MAX_CHARS, "b" * MAX_CHARS).content().is_cut


async def test_a_full_queue_drops_contents_and_a_store_that_comes_back_gets_the_others(
    database: Database, demo: Demo, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moiety_platform.request_contents.writer.STOP_S", 120.0)  # of a busy machine
    opt_in_id = await opt_in(database, demo, clock)
    writer = writer_of(database)
    fitting = MAX_QUEUED_CHARS // MAX_CHARS
    for number in range(fitting + 2):
        writer.put(f"r{number}", captured(demo.tenant_id, "x" * MAX_CHARS, opt_in_id=opt_in_id))
    assert writer.num_dropped == 2
    writer.start()
    await writer.stop()
    assert await num_stored(database) == fitting
