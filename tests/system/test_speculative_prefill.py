"""The real engine computes a conversation's next turn before it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEADLINE_S = 120


def test_a_next_turn_finds_in_the_cache_what_was_computed_before_it_came(
    server: Any, until: Callable[..., Any]
) -> None:
    tenant = server.admin.post("/admin/v1/tenants", json={"name": "foreseeing", "speculative_prefill": "free"}).json()
    project = server.admin.post("/admin/v1/projects", json={"tenant_id": tenant["id"], "name": "p"}).json()
    made = server.admin.post("/admin/v1/keys", json={"name": "k", "project_id": project["id"]}).json()
    headers = {"Authorization": f"Bearer {made['secret']}"}

    def ask(messages: list[dict[str, str]]) -> str:
        body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 60}
        answer = server.admin.post("/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def totals() -> dict[str, int]:
        (group,) = server.get("/admin/v1/usage", tenant_id=tenant["id"])["data"]
        return dict(group["totals"])

    def followed() -> float:
        text = server.admin.get("/metrics").text
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("moiety_speculative_prefill_total{")
        )

    for number in range(1, 13):  # of some, what follows the answer is less than a block
        turn = [{"role": "user", "content": f"What is {number} + {number * number}?"}]
        before = followed()
        turn += [{"role": "assistant", "content": ask(turn)}, {"role": "user", "content": "And 5 more?"}]
        until(lambda before=before: followed() > before, "the turn is followed")
        ask(turn)
        used = until(lambda number=number: (now := totals())["requests"] == 2 * number and now, "usage")
        if used["speculative_used_tokens"]:
            break
    assert 0 < used["speculative_used_tokens"] <= used["speculative_tokens"]
    assert used["speculative_used_tokens"] <= used["cached_tokens"]
    assert used["cost_nanodollars"] == 0
    load = server.fresh_load()
    assert load["speculative_tokens_total"] >= used["speculative_tokens"]
    assert server.get("/admin/v1/usage/reconciliation")["agrees"]
