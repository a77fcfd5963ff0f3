"""Erasing a tenant by the admin API reaches the engine's cache, and only what was that tenant's."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import httpx

PROMPT = list(range(3, 84))  # whole blocks, and one token more


def forgotten(server: Any) -> list[dict[str, Any]]:
    """Return what the engine has logged of the deletion."""
    lines = [line for line in server.output.splitlines() if '"tenant_blocks_deleted"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def test_an_erased_tenants_blocks_are_forgotten_and_anothers_are_found(
    server: Any, account: Any, until: Callable[..., Any]
) -> None:
    name = f"leaving-{secrets.token_hex(4)}"
    tenant = server.admin.post("/admin/v1/tenants", json={"name": name}).json()["id"]
    project = server.admin.post("/admin/v1/projects", json={"name": "web", "tenant_id": tenant}).json()["id"]
    key = server.admin.post("/admin/v1/keys", json={"name": "laptop", "project_id": project}).json()["secret"]

    def num_cached(secret: str) -> int:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": 1}
        answer = httpx.post(
            f"{server.url}/v1/completions", headers={"Authorization": f"Bearer {secret}"}, json=body, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    for secret in (key, account.secret):
        assert num_cached(secret) < 80
        assert num_cached(secret) == 80
    before = len(forgotten(server))
    erased = server.admin.delete(f"/admin/v1/tenants/{tenant}/data")
    assert erased.status_code == 202, erased.text
    told = until(lambda: forgotten(server)[before:], "the engine's word")
    assert [(one["num_tenants"], one["num_blocks"]) for one in told] == [(1, 80 // server.load()["block_size"])]
    assert num_cached(account.secret) == 80
