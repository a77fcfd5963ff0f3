"""Which of vLLM's test files run, and why some of their tests fail against Moiety."""

from __future__ import annotations

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
def reason_of(file: str, test: str, detail: str) -> str:
    return ""
