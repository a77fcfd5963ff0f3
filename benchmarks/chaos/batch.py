"""A batch that is processed during all faults: each of its lines must be answered once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from chaos.load import Tenant
from chaos.stage import NUM_GATEWAYS, SCRIPTED, Stage

ASK_S = 1.0
LINE_TOKENS = 300


class Batch:
    """A submitted batch."""

    def __init__(self, stage: Stage, tenant: Tenant, batch_id: str, num_lines: int) -> None:
        self._stage, self._tenant, self._id, self._num_lines = stage, tenant, batch_id, num_lines
        self.answer_ids: list[str] = []  # of the lines that were answered, once there is a result

    @classmethod
    async def submit(cls, stage: Stage, tenants: Sequence[Tenant], num_lines: int) -> Batch:
        tenant = next(one for one in tenants if one.service == "batch")
        headers = {"Authorization": f"Bearer {tenant.key}"}
        async with httpx.AsyncClient(base_url=stage.url(0), headers=headers, timeout=60) as client:
            data = {"purpose": "batch"}
            lines = "\n".join(json.dumps(_line(number)) for number in range(num_lines))
            sent = await client.post("/v1/files", data=data, files={"file": ("lines.jsonl", lines)})
            file_id = sent.raise_for_status().json()["id"]
            body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
            made = (await client.post("/v1/batches", json=body)).raise_for_status().json()
        return cls(stage, tenant, made["id"], num_lines)

    async def result(self, limit_s: float) -> dict[str, Any]:
        """Return the result of the batch, once it has ended."""
        headers, until_s = {"Authorization": f"Bearer {self._tenant.key}"}, time.monotonic() + limit_s
        found: dict[str, Any] = {}
        number = 0
        async with httpx.AsyncClient(headers=headers, timeout=30) as client:
            while found.get("status") not in ("completed", "failed", "expired") and time.monotonic() < until_s:
                number = (number + 1) % NUM_GATEWAYS
                with contextlib.suppress(httpx.HTTPError):
                    url = f"{self._stage.url(number)}/v1/batches/{self._id}"
                    found = (await client.get(url)).raise_for_status().json()
                await asyncio.sleep(ASK_S)
            lines = []
            if found.get("output_file_id"):
                url = f"{self._stage.url(number)}/v1/files/{found['output_file_id']}/content"
                lines = [json.loads(line) for line in (await client.get(url)).text.splitlines()]
        lines = [line for line in lines if line["response"]["status_code"] == httpx.codes.OK]
        self.answer_ids = [line["response"]["body"]["id"] for line in lines]
        answered = [line["custom_id"] for line in lines]
        return {
            "status": found.get("status"),
            "lines": self._num_lines,
            "answered": len(answered),
            "counts": found.get("request_counts"),
            "is_whole": sorted(answered) == sorted(str(number) for number in range(self._num_lines)),
        }


def _line(number: int) -> dict[str, Any]:
    body = {"model": SCRIPTED, "prompt": f"line {number} ", "max_tokens": LINE_TOKENS, "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
