"""One error names all that is wrong with a request body, within bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.request_body import MAX_NAMED_PROBLEMS, decode_body
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BEGUN = {"role": "assistant", "content": "Once"}
CALL = {**BEGUN, "function_call": {"name": "f", "arguments": "{}"}}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi"}


def error_of(schema: type[StrictBody], body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        decode_body(schema, json.dumps(body).encode(), 64)
    return caught.value


def test_all_bad_fields_are_named_and_the_first_is_the_parameter() -> None:
    error = error_of(ChatBody, {**CHAT, "temperature": 3, "n": 0, "stop": 7, "audio": {"voice": "ash"}})
    assert error.param == "temperature"
    assert error.message == (
        "the body has 4 problems: (1) 'temperature' must be less than or equal to 2; (2) 'stop' must be a string or a "
        "list of at most 32 strings, none of them empty or longer than 1,024 characters; (3) 'n' must be greater than "
        "or equal to 1; (4) 'audio' cannot be served: answers are text only; leave the field out"
    )


def test_one_invalid_field_is_reported_alone() -> None:
    error = error_of(ChatBody, {**CHAT, "n": 0})
    assert (error.param, error.message) == ("n", "'n' must be greater than or equal to 1")


def test_a_field_that_takes_several_types_is_named_once() -> None:
    for value in (7, [7], {"a": 1}, ["a", ""]):
        assert error_of(CompletionBody, {**COMPLETION, "stop": value}).message.startswith("'stop' must be a string")


def test_fields_that_do_not_go_together_are_named_all_at_once() -> None:
    options: dict[str, Any] = {"stream_options": {}, "top_logprobs": 2, "min_tokens": 9, "max_tokens": 1}
    error = error_of(ChatBody, {**CHAT, **options})
    assert error.param is None
    for words in ("3 problems", "'stream' is true", "'logprobs' is true", "'min_tokens' (9)"):
        assert words in error.message
    error = error_of(CompletionBody, {**COMPLETION, "best_of": 3, "prompt": "", "stream_options": {}})
    for words in ("3 problems", "'stream' is true", "'best_of'", "'prompt' is empty"):
        assert words in error.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "needs a last message of the assistant"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "needs a last message of the assistant"),
        ({"messages": [CALL]}, "needs a last message of the assistant"),
        ({"messages": [BEGUN], "add_generation_prompt": True}, "are both true"),
        ({"messages": [BEGUN], "tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "choose 'auto'"),
    ],
)
def test_only_an_assistants_text_is_continued(changes: dict[str, Any], words: str) -> None:
    assert words in error_of(ChatBody, {**CHAT, "continue_final_message": True, **changes}).message


def test_a_choice_of_tools_is_not_blamed_where_the_tools_are_bad() -> None:
    tools = [{"type": "function", "function": {"name": "a b"}}]
    error = error_of(ChatBody, {**CHAT, "tools": tools, "tool_choice": "required"})
    assert (error.param, "problems" in error.message) == ("tools.0.function.name", False)


def test_many_problems_are_counted_and_few_are_named() -> None:
    bad = {str(number): "x" for number in range(4000)}
    error = error_of(ChatBody, {**CHAT, "logit_bias": bad, "n": 0})
    assert error.message.startswith("the body has 4,001 problems: (1) 'logit_bias.0' must be a valid number;")
    assert error.message.endswith(f"; and {4001 - MAX_NAMED_PROBLEMS:,} more")
    assert len(error.message) < 1000


def test_a_list_is_read_to_its_first_bad_entry() -> None:
    messages = [{"role": "user", "content": "hi"}, *[{"role": "wizard"}] * 1000]
    error = error_of(ChatBody, {**CHAT, "messages": messages, "n": 0})
    assert "messages.1." in error.message
    assert "messages.2" not in error.message
    assert "'n' must" in error.message


def test_names_that_a_client_chose_are_shortened() -> None:
    result = {"role": "tool", "tool_call_id": "c" * 100_000, "content": ""}
    assert len(error_of(ChatBody, {**CHAT, "messages": [result]}).message) < 1000
    error = error_of(ChatBody, {**CHAT, "metadata": {"k" * 100_000: 1, "l" * 100_000: 1}})
    assert error.param is not None
    assert len(error.param) < 100 and len(error.message) < 1000
