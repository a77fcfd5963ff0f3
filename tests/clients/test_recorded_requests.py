"""Requests of coding agents, recorded from their packages and worded by us, get the right answer, whole and streamed.

Each file holds a request as the agent sends it, what the model writes, and the answer that the agent must get.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.clients.answers import RECORDED, answer_of, recorded_names
from tests.gateway.conftest import TOOL_TEMPLATES, RunningGateway, make_card, run_gateway

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.tokenizer import Tokenizer

MODEL = "hermes"
CONTEXT_TOKENS = 40_000
SMALL_CONTEXT_TOKENS = 20_000  # less than the max_tokens of agents that speak the messages API, which clamps them


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The file with this name."""
    return json.loads((RECORDED / f"{request.param}.json").read_text())


@pytest.fixture
async def gateway(tmp_path: Path, recorded: dict[str, Any]) -> AsyncIterator[RunningGateway]:
    template = (TOOL_TEMPLATES / "hermes.jinja").read_text()
    size = SMALL_CONTEXT_TOKENS if recorded["path"].startswith("/v1/messages") else CONTEXT_TOKENS
    card = make_card(MODEL, MODEL, max_context_tokens=size)
    card = msgspec.structs.replace(card, chat_template=template, follows_grammars=True)
    async with run_gateway(tmp_path, [FakeEngineClient(card)]) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("recorded", recorded_names(), indirect=True)
async def test_an_agents_request_gets_its_answer(
    gateway: RunningGateway, recorded: dict[str, Any], stream: bool
) -> None:
    writes = recorded["model_writes"]
    gateway.engine.script = lambda submit: [(65, letter) for letter in writes]
    body = recorded["body"] | {"model": MODEL, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    status, headers, data = await gateway.post(recorded["path"], body, headers=recorded["headers"])
    assert status == 200, data
    assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    answer = answer_of(recorded["path"], data, stream=stream)
    assert [[name, json.loads(arguments)] for name, arguments in answer.calls] == recorded["answer"]["calls"]
    assert answer.is_complete
    assert answer.text.strip() == recorded["answer"]["text"]
    (submit,) = gateway.engine.submits
    prompt = Tokenizer.from_json(gateway.engine.card.tokenizer_json).decode(submit.prompt_ids)
    missing = [text for text in recorded["prompt_has"] if text not in prompt]
    assert not missing, prompt
    assert not [text for text in recorded.get("prompt_lacks", ()) if text in prompt], prompt
