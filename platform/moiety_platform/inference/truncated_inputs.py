"""Token ids of prompts that are cut to a limit. Pure."""

from __future__ import annotations

from collections.abc import Callable

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import Conversation, Generation, Prompt, TextPair
from moiety_text.errors import TextNotEncodable, TooManyTokens
from moiety_text.tokenizer import Tokenizer


def truncated_inputs(
    tokenizer: Tokenizer,
    generation: Generation,
    max_context_tokens: int,
    encode_conversation: Callable[[Conversation], list[int]],
) -> list[tuple[list[int], int]]:
    """Return the ids of each prompt, and where the second segment of a pair begins, 0 for others. Raises BadRequest.

    The limit is the generation's, or what the context leaves beside the output if that is less.
    """
    asked = generation.truncate_tokens
    room = max_context_tokens - (0 if generation.embed else max(1, generation.max_tokens or 0))
    limit = max(1, room if asked is None or asked < 0 else min(asked, room))
    try:
        encoded = [_encode(tokenizer, generation, prompt, limit, encode_conversation) for prompt in generation.prompts]
    except TooManyTokens as exc:
        message = f"'truncate_prompt_tokens' is {asked}; with the special tokens, it must be at least {exc.at_least}"
        raise BadRequest(message, param="truncate_prompt_tokens") from exc
    except TextNotEncodable as exc:
        raise BadRequest(f"the model's tokenizer refused the input: {exc}") from exc
    if not all(ids for ids, _ in encoded):
        raise BadRequest("an input has no tokens; send at least one token of text", param=generation.prompt_field)
    return encoded


def _encode(
    tokenizer: Tokenizer,
    generation: Generation,
    prompt: Prompt,
    limit: int,
    encode_conversation: Callable[[Conversation], list[int]],
) -> tuple[list[int], int]:
    left = generation.truncates_left
    match prompt:
        case TextPair():
            return tokenizer.encode_truncated(prompt.first, prompt.second, limit)
        case str() if generation.adds_special_tokens:
            return tokenizer.encode_truncated(prompt, None, limit, from_left=left)
        case str():
            return _cut(tokenizer.encode(prompt), limit, left), 0
        case tuple():
            return _cut(list(prompt), limit, left), 0
        case Conversation() if prompt.images:
            message = "a conversation with images cannot be cut; leave it out, or leave out the images"
            raise BadRequest(message, param="truncate_prompt_tokens")
        case Conversation():
            return _cut(encode_conversation(prompt), limit, left), 0


def _cut(token_ids: list[int], limit: int, left: bool) -> list[int]:
    return token_ids[-limit:] if left else token_ids[:limit]
