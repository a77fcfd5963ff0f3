"""Files and batches with the real `openai` package against a gateway on loopback."""

from __future__ import annotations

import asyncio
import json

from sqlalchemy import select

from moiety_platform.usage.models import UsageRecord

MODEL = "tiny"
CHAT = "/v1/chat/completions"
DEADLINE_S = 20.0


def chat_line(custom_id, text="hello", **body):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def jsonl(lines) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def upload(gateway, content: bytes, name="input.jsonl"):
    return await gateway.client.files.create(file=(name, content), purpose="batch")


async def submit(gateway, lines, endpoint=CHAT, **more):
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = await upload(gateway, content)
    return await gateway.client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def wait_for(gateway, batch, *statuses):
    async with asyncio.timeout(DEADLINE_S):
        while batch.status not in statuses:
            await asyncio.sleep(0.02)
            batch = await gateway.client.batches.retrieve(batch.id)
    return batch


async def results(gateway, file_id):
    text = (await gateway.client.files.content(file_id)).text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def usage_rows(gateway):
    async with gateway.database.read() as session:
        return (await session.scalars(select(UsageRecord))).all()


async def test_a_batch_of_chats_is_answered_line_by_line_in_the_order_of_the_input(gateway):
    lines = [chat_line(f"line {number}", max_tokens=1 + number % 4) for number in range(40)]
    batch = await submit(gateway, lines, metadata={"for": "the test"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "the test"})
    batch = await wait_for(gateway, batch, "completed")
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    assert (batch.error_file_id, batch.errors) == (None, None)
    moments = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert moments == sorted(moments)
    assert batch.expires_at == batch.created_at + 24 * 3600
    output = await results(gateway, batch.output_file_id)
    assert [one["custom_id"] for one in output] == [line["custom_id"] for line in lines]
    for number, one in enumerate(output):
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        body = one["response"]["body"]
        assert body["choices"][0]["message"]["content"] == " ".join(str(i + 1) for i in range(1 + number % 4))
        assert body["id"] == one["response"]["request_id"]
    assert len({one["id"] for one in output}) == 40
    rows = {row.request_id: row for row in await usage_rows(gateway)}
    assert len(rows) == 40
    for one in output:
        row, usage = rows[one["response"]["request_id"]], one["response"]["body"]["usage"]
        assert (row.prompt_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (row.service_class, row.outcome, row.endpoint) == ("batch", "length", CHAT)
    assert batch.usage.output_tokens == sum(row.output_tokens for row in rows.values())
