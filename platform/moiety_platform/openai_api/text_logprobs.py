r"""Log probabilities in the format of `/v1/completions`: token names and the offset of each token in the text.

Tokens are distinguished by id, or by their bytes where an engine sends no id. A token whose bytes alone are no valid
UTF-8 is named as OpenAI names it, `bytes:\xe6\x97`. If several tokens have the same text, the sampled token is named
by the text, otherwise the most likely one. The others are named `token_id:5`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from moiety_platform.openai_api.answer_types import PromptLogprob, PromptLogprobs, TextLogprobs
from moiety_wire.messages import TokenLogprob


class TextOffsets:
    """Running offset of one choice's tokens in its text. Owned by the builder of the answer."""

    def __init__(self, start: int = 0) -> None:
        """Start at `start`, the number of characters of an echoed prompt before the first token."""
        self._at = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, entry: TokenLogprob) -> int:
        """Return the offset of the next token, which is the offset of the first character that it is a part of."""
        at = self._at
        if entry.num_chars >= 0:
            self._at += entry.num_chars
        else:  # external engine, which does not send the number of characters
            self._at += len(self._utf8.decode(entry.token_bytes))
        return at


def text_logprobs(
    logprobs: Sequence[TokenLogprob],
    offsets: TextOffsets,
    before: TextLogprobs | None = None,
    *,
    names_ids: bool = False,
) -> TextLogprobs:
    """Return the log probabilities of generated tokens, appended to those in `before`.

    With `names_ids` every token is named by its id.
    """
    found: TextLogprobs = {
        "tokens": [_name(entry.token_bytes, entry.token_id, names_ids) for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [_top(entry, names_ids) for entry in logprobs],
        "text_offset": [offsets.advance(entry) for entry in logprobs],
    }
    if before is None:
        return found
    return {
        "tokens": before["tokens"] + found["tokens"],
        "token_logprobs": before["token_logprobs"] + found["token_logprobs"],
        "top_logprobs": before["top_logprobs"] + found["top_logprobs"],
        "text_offset": before["text_offset"] + found["text_offset"],
    }


def echoed_logprobs(
    text: str, first_id: int, first: bytes, scores: Sequence[TokenLogprob], *, num_best: int, names_ids: bool = False
) -> TextLogprobs:
    """Return the log probabilities of an echoed prompt with the text `text`, and of the `num_best` most likely tokens.

    The first token has none.
    """
    scores = [msgspec.structs.replace(entry, top=entry.top[:num_best]) for entry in scores]
    return {
        "tokens": [
            _name(first, first_id, names_ids),
            *(_name(entry.token_bytes, entry.token_id, names_ids) for entry in scores),
        ],
        "token_logprobs": [None, *(entry.logprob for entry in scores)],
        "top_logprobs": [None, *(_top(entry, names_ids) for entry in scores)],
        "text_offset": _places(text, [first, *(entry.token_bytes for entry in scores)]),
    }


def prompt_logprobs(scores: Sequence[TokenLogprob], num_best: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt's tokens and of the `num_best` most likely ones, in vLLM's format.

    Tokens are named by their ids. The first token has none.
    """
    found: PromptLogprobs = [None]
    for entry in scores:
        told: dict[str, PromptLogprob] = {
            str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.token}
        }
        for rank, top in enumerate(entry.top[:num_best], 1):
            told.setdefault(str(top.token_id), {"logprob": top.logprob, "rank": rank, "decoded_token": top.token})
        found.append(told)
    return found


def _places(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Return the offset of each token in the text.

    A first token such as BOS may have no text, and the space before the first word of the text may be missing.
    """
    utf8, at, places = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for number, token in enumerate(tokens):
        places.append(at)
        piece = utf8.decode(token)
        if not text.startswith(piece, at):
            bare = piece.lstrip(" ")
            piece = bare if bare and text.startswith(bare, at) else "" if number == 0 else piece
        at = min(len(text), at + len(piece))
    return places


def _name(token: bytes, token_id: int, names_ids: bool) -> str:
    if token_id >= 0 and (names_ids or not token):
        return f"token_id:{token_id}"
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _top(entry: TokenLogprob, names_ids: bool) -> dict[str, float]:
    """Return the most likely tokens and the sampled token, which need not be one of them."""
    sampled = _name(entry.token_bytes, entry.token_id, names_ids)
    found: dict[str, float] = {}
    is_among = False
    for top in entry.top:
        is_sampled = (top.token_id, top.token_bytes) == (entry.token_id, entry.token_bytes)
        name = _name(top.token_bytes, top.token_id, names_ids)
        if not is_sampled and (name == sampled or name in found) and top.token_id >= 0:
            name = f"token_id:{top.token_id}"
        if is_sampled:
            is_among, found[name] = True, top.logprob
        else:
            found.setdefault(name, top.logprob)
    if not is_among:
        found.setdefault(sampled, entry.logprob)
    return found
