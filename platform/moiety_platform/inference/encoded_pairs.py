"""Encoding of pairs of texts, such as a query with each document."""

from __future__ import annotations

from collections.abc import Sequence

from moiety_platform.errors import BadRequest, prompt_too_long
from moiety_platform.inference.generation import TextPair
from moiety_text.errors import TextNotEncodable, TooManyTokens
from moiety_text.tokenizer import Tokenizer


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[TextPair], limit: int) -> list[tuple[list[int], int]]:
    """Return the token ids of each pair, and where its second segment begins.

    Raises ContextTooLong for the first pair with more than `limit` tokens, before the next one is encoded, since each
    pair repeats the text that they share. Raises BadRequest for a text that cannot be encoded.
    """
    encoded: list[tuple[list[int], int]] = []
    try:
        for pair in pairs:
            encoded.append(tokenizer.encode_pair(pair.first, pair.second, max_tokens=limit))
            if (num_tokens := len(encoded[-1][0])) > limit:
                raise prompt_too_long(str(num_tokens), limit, limit)
    except TooManyTokens as exc:
        raise prompt_too_long(f"at least {exc.at_least}", limit, limit) from exc
    except TextNotEncodable as exc:
        raise BadRequest(f"the model's tokenizer refused the input: {exc}") from exc
    return encoded
