# ruff: noqa: F811  fixtures are imported
"""Quotas of requests with documents: checked before a file is read, and charged for the prompt that is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from .conftest import RunningGateway
from .pdf_files import pdf
from .test_documents import PAGES, asking, part_of
from .test_images import CHAT
from .test_quotas import (
    Limited,
    limit,
    limited,  # noqa: F401  a fixture
    used,
)
from .test_uploaded_images import PATHS


def has_read(gateway: RunningGateway) -> bool:
    """Return whether the gateway has started to read any PDF file."""
    return gateway.assembled.services.documents._extractor._template is not None


async def ask(gateway: RunningGateway, *parts: dict[str, Any], **more: Any) -> Any:
    body = {**asking(CHAT, *parts), **more}
    return await gateway.client.chat.completions.create(**body)


@pytest.mark.parametrize("path", PATHS)
async def test_no_document_is_read_for_a_tenant_whose_quota_is_used_up(limited: Limited, path: str) -> None:
    async with limited() as gateway:
        spent = await ask(gateway)
        quota = await limit(gateway, "tenant", spent.usage.total_tokens + 1)
        await gateway.post(path, asking(path))
        status, headers, answer = await gateway.post(path, asking(path, part_of(path, PAGES)))
        assert status == 429 and "limit" in json.loads(answer)["error"]["message"], answer
        assert int(headers["retry-after"]) > 0 and not has_read(gateway)
        assert await used(gateway, quota) <= quota["cap"]


async def test_a_quota_that_can_never_be_enough_is_said_before_a_document_is_read(limited: Limited) -> None:
    async with limited() as gateway:
        await limit(gateway, "key", 1)
        with pytest.raises(openai.APIStatusError) as refused:
            await ask(gateway, part_of(CHAT, PAGES))
        assert "needs at least 2" in refused.value.message and not has_read(gateway)


async def test_a_quota_is_charged_for_the_text_that_is_read(limited: Limited) -> None:
    async with limited(credit_window_tokens=8) as gateway:
        answer = await ask(gateway, part_of(CHAT, PAGES))
        size = answer.usage.prompt_tokens
        quota = await limit(gateway, "tenant", 2 * size + answer.usage.completion_tokens + 6)
        await ask(gateway, part_of(CHAT, PAGES))
        cut = await ask(gateway, part_of(CHAT, PAGES), max_tokens=100)
        assert (cut.usage.prompt_tokens, cut.usage.completion_tokens) == (size, 6)
        assert await used(gateway, quota) == quota["cap"]


async def test_a_document_that_cannot_be_read_costs_nothing(limited: Limited) -> None:
    async with limited() as gateway:
        quota = await limit(gateway, "tenant", 1000)
        with pytest.raises(openai.BadRequestError):
            await ask(gateway, part_of(CHAT, pdf("")))
        assert await used(gateway, quota) == 0
        await ask(gateway, part_of(CHAT, PAGES))
        assert await used(gateway, quota) > 0


async def test_a_request_with_a_document_takes_one_of_the_parallel_requests(limited: Limited) -> None:
    async with limited() as gateway:
        await limit(gateway, "tenant", 1, "concurrent_requests")
        for _ in range(2):
            await ask(gateway, part_of(CHAT, PAGES))
        answers = await asyncio.gather(*(ask(gateway, part_of(CHAT, PAGES)) for _ in range(3)), return_exceptions=True)
        assert sum(isinstance(answer, openai.RateLimitError) for answer in answers) in (1, 2), answers


async def test_money_pays_for_as_much_as_without_a_document(limited: Limited) -> None:
    async with limited(credit_window_tokens=8) as gateway:
        price = {"model": "tiny", "input": "1", "output": "2"}
        await gateway.admin("PUT", "/prices", price)
        size = (await ask(gateway, part_of(CHAT, PAGES))).usage.prompt_tokens
        quota = await limit(gateway, "tenant", 1000 * (size + 2 * 6), "money_per_day")
        cut = await ask(gateway, part_of(CHAT, PAGES), max_tokens=100)
        assert cut.usage.completion_tokens == 6
        assert await used(gateway, quota) == quota["cap"]


async def test_a_quota_that_is_too_small_for_the_text_refuses_the_request_and_nothing_is_billed(
    limited: Limited,
) -> None:
    async with limited() as gateway:
        size = (await ask(gateway, part_of(CHAT, PAGES))).usage.prompt_tokens
        small = (await ask(gateway)).usage.total_tokens
        assert small < size
        quota = await limit(gateway, "tenant", size)  # the lower bound fits, and the prompt with its first output not
        money = await limit(gateway, "key", 10**12, "money_per_month")
        await gateway.admin("PUT", "/prices", {"model": "tiny", "input": "1", "output": "2"})
        num_submits = len(gateway.engine.submits)
        with pytest.raises(openai.RateLimitError) as refused:
            await ask(gateway, part_of(CHAT, PAGES))
        assert has_read(gateway) and "limit" in refused.value.message
        assert len(gateway.engine.submits) == num_submits
        assert [await used(gateway, one) for one in (quota, money)] == [0, 0]
        row = (await gateway.admin("GET", "/usage/requests"))["data"][0]
        assert (row["outcome"], row["prompt_tokens"], row["output_tokens"]) == ("rejected", 0, 0)
        assert row["cost_nanodollars"] == 0
        await ask(gateway)
        assert await used(gateway, quota) == small, "the lower bound is free again"


async def test_a_quota_that_others_use_up_while_a_document_is_read_refuses_the_request(limited: Limited) -> None:
    async with limited() as gateway:
        size = (await ask(gateway, part_of(CHAT, PAGES))).usage.total_tokens
        quota = await limit(gateway, "tenant", size + size // 2)
        answers = await asyncio.gather(*(ask(gateway, part_of(CHAT, PAGES)) for _ in range(4)), return_exceptions=True)
        served = [answer for answer in answers if not isinstance(answer, openai.RateLimitError)]
        assert [answer.usage.total_tokens for answer in served] == [size], answers
        assert await used(gateway, quota) == size
