"""Files of vLLM's tests that run, and the reasons why some of their tests fail against Moiety."""

from __future__ import annotations

import re

FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_enable_force_include_usage.py",
    "openai/chat_completion/test_include_reasoning.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_non_object_body_validation.py",
    "openai/chat_completion/test_thinking_token_budget.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/decisions/test_decisions_e2e.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)

_CONTEXT = "the demo model's context has 2,048 tokens"
_SCRIPTED = "the scripted engine does not know the answer, does not count its tokens, or answers at once"
_DEMO = "the demo model answers otherwise, or does not end a string within the limit"
_WORDS = "the request is refused with 400 or 404 as expected; the message has other words"
_FORCED = "a call that must come begins at once, without reasoning"

# The first rule counts whose patterns are found in the test's path and in its error.
_RULES = tuple(
    (re.compile(test), re.compile(detail), reason)
    for test, detail, reason in (
        ("", "zephyr-lora", "an adapter of the server's command line"),
        ("", "attribute 'prompt_logprobs'", "answers have `prompt_logprobs` only if the request asks for them"),
        ("", "'logprob_token_ids' cannot", "`logprob_token_ids` is refused"),
        ("", "'use_beam_search' cannot", "beam search is refused"),
        ("", "'echo' cannot", "chats are not echoed"),
        ("", "'(top|prompt)_logprobs' must be", "-1 log probabilities, for the whole vocabulary, are refused"),
        ("", "'my-custom-role'", "roles that OpenAI's API does not have are refused"),
        ("", "maximum context length is 2048", _CONTEXT),
        ("/invocations|test_invocations", "404", "there is no `/invocations` of SageMaker"),
        ("tokenizer_info", "404", "there is no `/tokenizer_info`"),
        ("server_load", "404", "there is no `/load`; `/metrics` has the load"),
        ("kv_transfer", "", "`kv_transfer_params` of a client have no effect"),
        ("per_request_metrics", "", "there are no metrics in answers; traces and usage have them"),
        ("enable_force_include_usage", "", "an option of the server's command line"),
        ("test_check_models", "'root'", "models have OpenAI's fields, and `max_model_len`, not `root`"),
        ("test_enable_response_messages", "", "`enable_response_messages` has no effect"),
        (
            "cache_usage",
            "cache_creation",
            "written cached tokens are counted with `cache_control` only",
        ),
        ("function_calling", "attribute 'reasoning'|0 = len", _FORCED),
        ("function_tool_use\\[required", "None is not None", _FORCED),
        ("logit_bias_invalid", "", "the test asks vLLM's code for the size of the vocabulary"),
        ("test_chat_streaming", "content=None", "the chunk with `finish_reason` has no content, as in OpenAI's API"),
        ("stream_options", "1 == 0", "the chunk with the role and the first with text both count one token"),
        ("test_long_seed|multiple_non_integer|test_empty_prompt|out_of_vocab", "", _WORDS),
        ("test_store|background_error|cancel_completed", "Regex pattern", _WORDS),
        ("responses/|test_named_tool_use|max_tokens_with_tool", "", _SCRIPTED),
        ("choice_chat", "!=", _DEMO),
        ("test_chat.py|test_completion.py", "JSONDecodeError|'stop' == 'length'|'2'|0 >= 5|assert 2 == 1", _DEMO),
    )
)


def reason_of(file: str, test: str, detail: str) -> str:
    """Return why the test fails, or an empty string where that is not known."""
    place = f"{file}::{test}"
    return next((reason for path, error, reason in _RULES if path.search(place) and error.search(detail)), "")
