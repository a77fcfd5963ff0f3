"""Compactions with the demo model, which is too small to write a summary: clients can go on nevertheless."""

from __future__ import annotations

from typing import Any

import pytest

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "short": [{"role": "user", "content": "What is the capital of France?"}],
    "turns": [
        {"role": "user", "content": "What is 12 + 30?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "And 7 + 8?"},
        {"role": "assistant", "content": "15"},
    ],
    "greeting": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello! How can I help?"}],
    "instructions": [
        {"role": "developer", "content": "You write code."},
        {"role": "user", "content": "Write a function that adds two numbers."},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
        {"role": "user", "content": "Now add three numbers, and write a test for it."},
        {"role": "assistant", "content": "def add3(a, b, c):\n    return a + b + c"},
    ],
    "long": [{"role": "user", "content": f"This is line {number} of many lines."} for number in range(400)],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_compaction_succeeds_and_the_conversation_goes_on(server: Any, account: Any, name: str) -> None:
    items = CONVERSATIONS[name]
    compacted = account.post("/v1/responses/compact", {"model": server.model, "input": items})
    assert compacted.status_code == 200, compacted.text
    output = compacted.json()["output"]
    users = [item for item in items if item.get("role") == "user"]
    assert [item["type"] for item in output] == ["message"] * len(users) + ["compaction"]
    assert len(output[-1]["encrypted_content"]) > 40
    adjusted = compacted.headers.get("x-moiety-adjusted-fields", "")
    assert name != "instructions" or adjusted == "summary=transcript", "the demo model ends at once"
    go_on = {"role": "user", "content": "What is 2 + 2?"}
    asked = {"model": server.model, "input": [output[-1], go_on], "max_output_tokens": 8}
    answer = account.post("/v1/responses", asked)
    assert answer.status_code == 200, answer.text
    triggered = account.post(
        "/v1/responses", {"model": server.model, "input": [*items, {"type": "compaction_trigger"}]}
    )
    assert triggered.status_code == 200, triggered.text
    assert [item["type"] for item in triggered.json()["output"]] == ["compaction"]
