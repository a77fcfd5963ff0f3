"""A model of the Harmony format with random weights: its channels are in their places by the engine's doing alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from moiety_demo import checkpoint_path
from moiety_text.harmony.reader import CONTROL_TOKENS

ASKED: list[Any] = [{"role": "user", "content": "Is it warm?"}]
SCHEMA = {
    "type": "object",
    "properties": {"warm": {"type": "boolean"}, "city": {"type": "string", "maxLength": 5}},
    "required": ["warm", "city"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA, "strict": True}}
    for name in ("find", "ask")
]
BUDGET = 24
MOST = BUDGET + 4  # with the tokens before and after the reasoning's text


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, demo = tmp_path_factory.mktemp("gpt-oss"), checkpoint_path()
    tokenizer = tokenizers.Tokenizer.from_file(str(demo / "tokenizer.json"))
    tokenizer.add_special_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(Path(__file__).parents[1] / "gateway" / "templates" / "harmony.jinja", folder / "chat_template.jinja")
    ends = [tokenizer.token_to_id(token) for token in ("<|return|>", "<|call|>")]
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    return folder


@pytest.fixture(scope="module")
def client(
    start_server: Callable[..., AbstractContextManager[Any]],
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[openai.OpenAI]:
    options = ("--model", str(model_folder), "--name", "gpt-oss", "--load-format", "dummy", "--dtype", "float32")
    with (
        start_server(tmp_path_factory.mktemp("system"), *options) as server,
        openai.OpenAI(api_key=server.key("tenant"), base_url=f"{server.url}/v1", max_retries=0) as made,
    ):
        yield made


def asked(client: openai.OpenAI, *, stream: bool, seed: int, **more: Any) -> Any:
    """Return the message and the usage of a chat."""
    body: dict[str, Any] = {"model": "gpt-oss", "messages": ASKED, "max_tokens": 400, "seed": seed, **more}
    if not stream:
        answer = client.chat.completions.create(**body)
        return answer.choices[0].message, answer.usage
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
        try:
            answer = events.get_final_completion()
        except openai.LengthFinishReasonError as exc:
            answer = exc.completion
    return answer.choices[0].message, answer.usage


@pytest.mark.parametrize("stream", [False, True])
def test_structured_outputs_come_in_the_final_channel_after_limited_reasoning(
    client: openai.OpenAI, stream: bool
) -> None:
    thoughts = 0
    for seed in range(6):
        more = {"response_format": FORM, "extra_body": {"thinking_token_budget": BUDGET}}
        message, usage = asked(client, stream=stream, seed=seed, **more)
        found = json.loads(message.content)
        assert found.keys() == {"warm", "city"} and isinstance(found["warm"], bool)
        assert usage.completion_tokens_details.reasoning_tokens <= MOST + BUDGET
        thoughts += bool(getattr(message, "reasoning_content", None))
    assert thoughts


@pytest.mark.parametrize("stream", [False, True])
def test_strict_calls_that_must_come_follow_the_reasoning(client: openai.OpenAI, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "ask"}}
    found = []
    for seed, choice in enumerate(("required", named) * 4):
        more = {"tools": TOOLS, "tool_choice": choice, "extra_body": {"thinking_token_budget": BUDGET}}
        message, _ = asked(client, stream=stream, seed=seed, **more)
        if message.tool_calls is None:  # reasoning whose opener was spelled by unusual tokens has no limit
            assert not message.content
            continue
        (call,) = message.tool_calls
        assert call.function.name in (("find", "ask") if choice == "required" else ("ask",))
        assert json.loads(call.function.arguments).keys() == {"warm", "city"}
        found.append(bool(getattr(message, "reasoning_content", None)))
    assert len(found) >= 4 and any(found)
