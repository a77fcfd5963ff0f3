"""Anthropic's Files API under `/v1/files` with the real `anthropic` package, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from tests.gateway.anthropic_clients import client, open_client
from tests.gateway.cards import make_card
from tests.gateway.conftest import RunningGateway, run_gateway

from moiety_platform.anthropic_api.schemas import MessagesBody
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.files.schemas import UPLOAD_FORM
from moiety_platform.inference.model_texts import ModelText
from moiety_wire.messages import ModelCard

__all__ = ["client", "open_client"]  # fixtures
BETA: Any = ["files-api-2025-04-14"]
HOUR_S = 3600


async def test_a_file_is_uploaded_listed_fetched_and_deleted(client: anthropic.AsyncAnthropic) -> None:
    files = client.beta.files
    uploaded = await files.upload(file=("notes.txt", b"The sky is green.", "text/plain"), betas=BETA)
    assert (uploaded.type, uploaded.filename, uploaded.mime_type) == ("file", "notes.txt", "text/plain")
    assert (uploaded.size_bytes, uploaded.downloadable) == (17, False)
    assert await files.retrieve_metadata(uploaded.id, betas=BETA) == uploaded
    others = [await files.upload(file=(f"{i}.png", b"x"), betas=BETA) for i in range(4)]
    ids = [one.id async for one in files.list(limit=2, betas=BETA)]
    assert ids == [one.id for one in [*others[::-1], uploaded]]
    removed = await files.delete(uploaded.id, betas=BETA)
    assert (removed.id, removed.type) == (uploaded.id, "file_deleted")
    with pytest.raises(anthropic.NotFoundError) as missing:
        await files.retrieve_metadata(uploaded.id, betas=BETA)
    assert missing.value.body["error"]["type"] == "not_found_error"


async def test_pages_of_earlier_clients_are_read_in_both_directions(
    client: anthropic.AsyncAnthropic, gateway: RunningGateway
) -> None:
    ids = [(await client.beta.files.upload(file=(f"{i}", b"x"))).id for i in range(5)][::-1]
    headers = {"anthropic-version": "2023-06-01", "x-api-key": gateway.key}

    async def page(**query: Any) -> Any:
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
            answer = await http.get("/v1/files", params=query)
        return answer.json() | {"status": answer.status_code}

    first = await page(limit=2)
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:2], True)
    second = await page(limit=2, after_id=first["last_id"])
    assert [one["id"] for one in second["data"]] == ids[2:4]
    back = await page(limit=2, before_id=ids[3])
    assert ([one["id"] for one in back["data"]], back["has_more"], back["next_page"]) == (ids[1:3], True, None)
    wrong: tuple[dict[str, Any], ...] = (
        *({"limit": 0}, {"limit": 1001}, {"page": "x"}, {"before_id": ids[0], "after_id": ids[1]}, {"scope_id": "x"}),
    )
    for query in wrong:
        answer = await page(**query)
        assert (answer["status"], answer["type"]) == (400, "error"), query


async def test_uploads_are_not_downloaded_but_files_of_the_server_are(
    client: anthropic.AsyncAnthropic, gateway: RunningGateway
) -> None:
    uploaded = await client.beta.files.upload(file=("a.txt", b"text"), betas=BETA)
    with pytest.raises(anthropic.BadRequestError, match="uploads cannot be downloaded"):
        await client.beta.files.download(uploaded.id, betas=BETA)
    assert (await gateway.client.files.content(uploaded.id)).read() == b"text"  # OpenAI's API has no such rule
    assert (await gateway.client.files.retrieve(uploaded.id)).purpose == "user_data"


async def test_an_upload_may_expire(client: anthropic.AsyncAnthropic) -> None:
    uploaded = await client.beta.files.upload(file=("a.txt", b"text"), expires_in_seconds=HOUR_S, betas=BETA)
    assert uploaded.expires_at is not None
    assert (uploaded.expires_at - uploaded.created_at).total_seconds() == HOUR_S
    for seconds in (0, HOUR_S - 1, 10**9):
        with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds"):
            await client.beta.files.upload(file=("a.txt", b"text"), expires_in_seconds=seconds, betas=BETA)


@pytest.fixture
def card() -> ModelCard:
    return make_card()


@pytest.fixture
async def gateway(tmp_path: Path, database_url: str, card: ModelCard) -> AsyncIterator[RunningGateway]:
    """A gateway on the database of the test."""
    async with run_gateway(tmp_path, [FakeEngineClient(card)], migrated_url=database_url) as running:
        yield running


def test_the_form_of_an_upload_is_described_with_the_fields_of_both_apis() -> None:
    valid = jsonschema.Draft202012Validator(UPLOAD_FORM).is_valid
    file, after = {"file": "a"}, {"expires_after[anchor]": "created_at", "expires_after[seconds]": HOUR_S}
    assert all(map(valid, (file, file | {"expires_in_seconds": HOUR_S}, file | {"purpose": "batch"} | after)))
    wrong: tuple[dict[str, Any], ...] = (
        {"purpose": "x"},
        {"expires_in_seconds": 1},
        {"expires_after[anchor]": "created_at"},
    )
    assert not any(valid(file | one) for one in wrong)
    assert not valid({"purpose": "batch"})


async def test_both_apis_show_the_same_files_and_only_those_of_the_project(
    client: anthropic.AsyncAnthropic, gateway: RunningGateway, open_client: Any
) -> None:
    batch = await gateway.client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    assert [one.id async for one in client.beta.files.list(betas=BETA)] == [batch.id]
    async with open_client(gateway, api_key="mty_" + "x" * 16 + ".y") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.beta.files.list(betas=BETA)
    with pytest.raises(openai.BadRequestError, match="'purpose' is missing"):
        await gateway.client.files.create(file=("a", b"x"), purpose=openai.omit)


def document(file_id: str, **more: Any) -> Any:
    return {"type": "document", "source": {"type": "file", "file_id": file_id}, **more}


def asking(*blocks: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "What colour?"}]}],
    }


async def test_a_document_of_an_uploaded_file_is_read_like_one_in_the_request(
    client: anthropic.AsyncAnthropic, gateway: RunningGateway
) -> None:
    text = "\ufeffThe sky is green. é"
    uploaded = await client.beta.files.upload(file=("notes.txt", text.encode(), "text/plain"), betas=BETA)
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text[1:]}, "title": "t"}
    named = asking(document(uploaded.id, title="t"))
    counted = await client.beta.messages.count_tokens(**named, betas=BETA)
    assert counted == await client.beta.messages.count_tokens(**asking(plain), betas=BETA)
    first = await client.beta.messages.create(**named, max_tokens=2, betas=BETA)
    second = await client.beta.messages.create(**asking(plain), max_tokens=2)
    assert first.usage.input_tokens == second.usage.input_tokens == counted.input_tokens
    prompts = [submit.prompt_ids for submit in gateway.engine.submits[-2:]]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe", "neither a PDF file nor plain text in UTF-8"),
        (b"a\0", "neither a PDF file nor plain text; "),
        (b"a" * (4 << 20) + b"b", "too large"),
    ],
)
async def test_a_file_that_is_no_plain_text_is_refused_as_a_document(
    client: anthropic.AsyncAnthropic, content: bytes, complaint: str
) -> None:
    uploaded = await client.beta.files.upload(file=("a.txt", content, "text/plain"), betas=BETA)
    with pytest.raises(anthropic.BadRequestError, match=complaint):
        await client.beta.messages.create(**asking(document(uploaded.id)), max_tokens=2, betas=BETA)


async def test_a_document_of_no_file_or_of_another_purpose_is_refused(
    client: anthropic.AsyncAnthropic, gateway: RunningGateway
) -> None:
    batch = await gateway.client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")
    with pytest.raises(anthropic.BadRequestError, match="has the purpose 'batch'"):
        await client.beta.messages.create(**asking(document(batch.id)), max_tokens=2, betas=BETA)
    with pytest.raises(anthropic.NotFoundError, match="there is no file"):
        await client.beta.messages.create(**asking(document("file_none")), max_tokens=2, betas=BETA)


async def test_a_document_that_was_not_read_is_an_error_and_not_an_empty_text(card: ModelCard) -> None:
    body = MessagesBody.model_validate({**asking(document("file_1")), "max_tokens": 2})
    body.check()  # of a line of a batch, whose files are read when it is answered
    with pytest.raises(RuntimeError, match="must be read before its prompt is made"):
        await ModelText(card, 1 << 20).encode(body.generation().prompts)
