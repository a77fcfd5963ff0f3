"""Checks of token ids that a client sends, and the ids of words that answers must not have. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moiety_platform.errors import BadRequest
from moiety_text.errors import TextNotEncodable
from moiety_text.tokenizer import Tokenizer

UNKNOWN_TOKEN = "unknown_token_id"  # error code


def check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> list[int]:
    """Return the ids of a prompt. Raises BadRequest, which names the `field`, unless the model has them."""
    if not token_ids:
        raise BadRequest("a prompt is empty; send at least one token id", param=field)
    if max(token_ids) >= vocab_size:
        message = f"token id {max(token_ids)} is not the model's; its ids are below {vocab_size}"
        raise BadRequest(message, code=UNKNOWN_TOKEN, param=field)
    return list(token_ids)


def check_decodable(tokenizer: Tokenizer, model: str, prompts: Sequence[Sequence[int]], field: str) -> None:
    """Check that all ids have text. Ids that exist only in the model's padded vocabulary have none."""
    for token_id in sorted({one for prompt in prompts for one in prompt}):
        if tokenizer.find_token(token_id) is None:
            message = f"token id {token_id} has no text in the tokenizer of the model {model!r}, so the prompt "
            message += "cannot be echoed; leave out 'echo', or the id"
            raise BadRequest(message, code=UNKNOWN_TOKEN, param=field)


def runs_of_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the beginning of a text and after a space.

    Raises BadRequest for a word that cannot be encoded.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        try:
            first, spaced = (tuple(tokenizer.encode(text)) for text in (bare, f" {bare}"))
        except TextNotEncodable as exc:
            raise BadRequest(f"the model's tokenizer refused a word: {exc}", param="bad_words") from exc
        runs[first] = None
        if spaced[-len(first) :] != first:  # otherwise it contains the first one
            runs[spaced] = None
    return tuple(run for run in runs if run)
