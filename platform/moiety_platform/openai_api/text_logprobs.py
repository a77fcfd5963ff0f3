"""Log probabilities in the form of `/v1/completions`: names of tokens, and where each token stands in the text.

A token is told from others by its id, and by its bytes where an engine tells no id. A token whose bytes alone are no
UTF-8 is named as OpenAI names it, `bytes:\\xe6\\x97`. Of several tokens with one text, the sampled one has the text as
its name, else the likeliest; the others are named `token_id:5`.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moiety_platform.openai_api.answer_types import TextLogprobs
from moiety_wire.messages import TokenLogprob


class TextOffsets:
    """Where the tokens of one choice stand in its text. Owned by whoever answers with the choice."""

    def __init__(self, start: int = 0) -> None:
        """`start`: the characters that come before the first token, an echoed prompt."""
        self._at = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, entry: TokenLogprob) -> int:
        """The offset of the next token: that of the first character it is a part of."""
        at = self._at
        if entry.num_chars >= 0:
            self._at += entry.num_chars
        else:  # an engine of others, which does not tell
            self._at += len(self._utf8.decode(entry.token_bytes))
        return at


def text_logprobs(
    logprobs: Sequence[TokenLogprob], offsets: TextOffsets, before: TextLogprobs | None = None
) -> TextLogprobs:
    """Of tokens that were generated, after those that come `before`."""
    found: TextLogprobs = {
        "tokens": [_name(entry.token_bytes, entry.token_id) for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [_top(entry) for entry in logprobs],
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


def echoed_logprobs(text: str, first_id: int, first: bytes, scores: Sequence[TokenLogprob]) -> TextLogprobs:
    """Of an echoed prompt, whose text is `text`. Its first token, which follows nothing, has no log probability."""
    return {
        "tokens": [_name(first, first_id), *(_name(entry.token_bytes, entry.token_id) for entry in scores)],
        "token_logprobs": [None, *(entry.logprob for entry in scores)],
        "top_logprobs": [None, *map(_top, scores)],
        "text_offset": _places(text, [first, *(entry.token_bytes for entry in scores)]),
    }


def _places(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Where tokens stand in the text that they are of. One that begins every prompt has no text; the space before a
    text's first word may be missing there."""
    utf8, at, places = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for number, token in enumerate(tokens):
        places.append(at)
        piece = utf8.decode(token)
        if not text.startswith(piece, at):
            bare = piece.lstrip(" ")
            piece = bare if bare and text.startswith(bare, at) else "" if number == 0 else piece
        at = min(len(text), at + len(piece))
    return places


def _name(token: bytes, token_id: int) -> str:
    if not token and token_id >= 0:
        return f"token_id:{token_id}"
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, and the sampled one, which need not be among them."""
    sampled = _name(entry.token_bytes, entry.token_id)
    found: dict[str, float] = {}
    is_among = False
    for top in entry.top:
        is_sampled = (top.token_id, top.token_bytes) == (entry.token_id, entry.token_bytes)
        name = _name(top.token_bytes, top.token_id)
        if not is_sampled and (name == sampled or name in found) and top.token_id >= 0:
            name = f"token_id:{top.token_id}"
        if is_sampled:
            is_among, found[name] = True, top.logprob
        else:
            found.setdefault(name, top.logprob)
    if not is_among:
        found.setdefault(sampled, entry.logprob)
    return found
