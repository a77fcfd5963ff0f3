"""Token ids of inputs that are cut to a limit, for embeddings, scores and classes. Pure."""

from __future__ import annotations

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import Conversation, Generation, Prompt, TextPair
from moiety_text.errors import TextNotEncodable, TooManyTokens
from moiety_text.tokenizer import Tokenizer


def truncated_inputs(
    tokenizer: Tokenizer, generation: Generation, max_context_tokens: int
) -> list[tuple[list[int], int]]:
    """Return the ids of each input, and where the second segment of a pair begins, 0 for others. Raises BadRequest.

    The limit is the generation's, or the context if that is less.
    """
    asked = generation.truncate_tokens
    limit = max_context_tokens if asked is None or asked < 0 else min(asked, max_context_tokens)
    try:
        encoded = [_encode(tokenizer, prompt, limit) for prompt in generation.prompts]
    except TooManyTokens as exc:
        message = f"'truncate_prompt_tokens' is {asked}; with the special tokens, it must be at least {exc.at_least}"
        raise BadRequest(message, param="truncate_prompt_tokens") from exc
    except TextNotEncodable as exc:
        raise BadRequest(f"the model's tokenizer refused the input: {exc}") from exc
    if not all(ids for ids, _ in encoded):
        raise BadRequest("an input has no tokens; send at least one token of text", param=generation.prompt_field)
    return encoded


def _encode(tokenizer: Tokenizer, prompt: Prompt, limit: int) -> tuple[list[int], int]:
    match prompt:
        case TextPair():
            return tokenizer.encode_truncated(prompt.first, prompt.second, limit)
        case str():
            return tokenizer.encode_truncated(prompt, None, limit)
        case tuple():
            return list(prompt[:limit]), 0
        case Conversation():
            raise AssertionError("a conversation is not truncated")
