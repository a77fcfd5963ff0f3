"""Submit a batch to a running gateway, wait for its end, and read its results and its usage rows."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sqlalchemy import select

from moiety_platform.usage.models import UsageRecord

from .conftest import RunningGateway

MODEL = "tiny"
CHAT = "/v1/chat/completions"
DEADLINE_S = 60.0


def chat_line(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def jsonl(lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(gateway: RunningGateway, content: bytes, name: str = "input.jsonl") -> Any:
    return await gateway.client.files.create(file=(name, content), purpose="batch")


async def submit(gateway: RunningGateway, lines: Any, endpoint: Any = CHAT, **more: Any) -> Any:
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await upload(gateway, content)
    return await gateway.client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def wait_for(gateway: RunningGateway, batch: Any, *statuses: Any) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        while batch.status not in statuses:
            await asyncio.sleep(0.02)
            batch = await gateway.client.batches.retrieve(batch.id)
    return batch


async def wait_answered(gateway: RunningGateway, batch: Any, least: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while batch.request_counts.completed < least:
            await asyncio.sleep(0.01)
            batch = await gateway.client.batches.retrieve(batch.id)


async def results(gateway: RunningGateway, file_id: str) -> Any:
    text = (await gateway.client.files.content(file_id)).text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def usage_rows(gateway: RunningGateway) -> Any:
    async with gateway.database.read() as session:
        return (await session.scalars(select(UsageRecord))).all()
