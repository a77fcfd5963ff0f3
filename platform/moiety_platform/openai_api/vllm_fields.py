"""Request fields that vLLM adds to OpenAI's APIs, beside those of sampling and structured outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, StringConstraints

from moiety_platform.inference.body_fields import INT32_MAX, StrictBody, TokenId
from moiety_platform.inference.field_support import ignored, refused

MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64

BadWord = Annotated[str, StringConstraints(min_length=1, max_length=MAX_BAD_WORD_CHARS, pattern=r"\S")]
_Objects = dict[str, Any]
_TokenBudget = Annotated[int, Field(ge=0, le=INT32_MAX)]


class VllmFields(StrictBody):
    """Fields of both endpoints."""

    use_beam_search: Annotated[bool | None, refused("beam search is not supported; leave it out", [False])] = None
    length_penalty: Annotated[FiniteFloat | None, ignored("The field affects beam search only.")] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[
        bool | None, ignored("Tokens are joined as the tokenizer writes them.")
    ] = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None  # -1: what the context leaves
    truncation_side: Literal["left", "right"] | None = None  # where tokens are cut off
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logprob_token_ids: Annotated[
        Any, refused("log probabilities are of the most likely tokens; leave it out, and request enough of them", [[]])
    ] = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    logits_processors: Annotated[Any, refused("the server runs no code of clients; leave it out", [[]])] = None
    return_tokens_as_token_ids: bool | None = None  # log probabilities name each token `token_id:N`
    return_token_ids: bool | None = None
    priority: Annotated[int | None, ignored("The service class decides. Choose one with `service_tier`.")] = None
    request_id: Annotated[
        str | None, ignored("The server names the answer. Send the header `X-Request-Id` to find it in logs.")
    ] = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: Annotated[_Objects | None, ignored("The server chooses the engines of a request.")] = None
    vllm_xargs: Annotated[_Objects | None, ignored("No extension reads the field.")] = None


class VllmChatFields(VllmFields):
    """Fields of chats."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer goes on with the last message, an assistant's
    add_special_tokens: Annotated[
        bool | None, refused("the chat template writes the special tokens; leave it out", [False])
    ] = None
    include_reasoning: bool | None = None
    thinking_token_budget: _TokenBudget | None = None  # most tokens of the reasoning; 0: no reasoning
    max_thinking_tokens: _TokenBudget | None = None  # the same, by other servers' name; the smaller one counts
    documents: Annotated[list[_Objects], Field(max_length=1024)] | None = None  # a variable of the chat template
    echo: Annotated[bool | None, refused("chats are not echoed; leave it out", [False])] = None
    chat_template: Annotated[
        Any, refused("a request cannot bring a chat template; leave it out, or send the prompt to /v1/completions", [])
    ] = None
    media_io_kwargs: Annotated[_Objects | None, ignored("Images are decoded in one way.")] = None
    mm_processor_kwargs: Annotated[_Objects | None, ignored("The model's files define how images are scaled.")] = None


class VllmCompletionFields(VllmFields):
    """Fields of text completions."""

    add_special_tokens: bool | None = None  # of the tokenizer to a prompt of text
    prompt_embeds: Annotated[Any, refused("prompts are texts or token ids; leave it out", [])] = None
