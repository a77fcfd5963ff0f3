"""A model's tokenizer for the grammar library: added tokens by their ids, all other tokens by their bytes.

Added tokens (special or not) and tokens that end an answer have no spelling here. A text in a grammar is spelled with
ordinary tokens, also where it reads like an added token; only a token's id or its name outside of a string refers to
the token itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from moiety_text.tokenizer import Tokenizer


class GrammarTokenizer:
    """Tokenizer that `LLTokenizer` reads instead of a tokenizer file. The library calls it from several threads."""

    is_tokenizer_wrapper = True  # the library recognizes a wrapper by this attribute
    bos_token_id = None

    def __init__(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        """Build the wrapper.

        Raises moiety_text's errors, and ValueError where ordinary tokens cannot spell every text.
        """
        tokenizer = Tokenizer.from_json(tokenizer_json)
        by_id = frozenset({*tokenizer.added_tokens, *eos_token_ids})
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = sorted(by_id)
        self.tokens = [
            b"" if tokenizer.find_token(token_id) is None else tokenizer.token_bytes(token_id)
            for token_id in range(tokenizer.vocab_size)
        ]
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in by_id}
        self._max_bytes = max(map(len, self._ids), default=0)
        self._by_id = by_id
        missing = [byte for byte in range(0x20, 0x7F) if bytes([byte]) not in self._ids]
        if missing:
            raise ValueError(f"its tokenizer has no token for the character {chr(missing[0])!r} alone")
        self._backend = _without_added_tokens(tokenizer_json)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the ordinary tokens with which the model would write a text.

        Never raises, since the library does not expect errors here.
        """
        wanted = text.encode() if isinstance(text, str) else text
        with contextlib.suppress(Exception):
            found = self._backend.encode(wanted.decode(), add_special_tokens=False).ids
            is_ordinary = self._by_id.isdisjoint(found)
            if is_ordinary and b"".join([self.tokens[token_id] for token_id in found]) == wanted:
                return found
        return self._spell(wanted)  # for instance because its normalizer would change the text

    def _spell(self, text: bytes) -> list[int]:
        """Spell a text by its longest tokens from the left. Bytes without a token are left out."""
        found, at = [], 0
        while at < len(text):
            for length in range(min(self._max_bytes, len(text) - at), 0, -1):
                token_id = self._ids.get(text[at : at + length])
                if token_id is not None:
                    found.append(token_id)
                    break
            else:
                length = 1
            at += length
        return found


def _without_added_tokens(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Return a tokenizer's model that treats any text as part of another: nothing is added at its beginning."""
    spec = json.loads(tokenizer_json)
    spec["added_tokens"] = []
    spec["post_processor"] = None
    spec["normalizer"] = _without_prefix(spec.get("normalizer"))
    spec["pre_tokenizer"] = _without_prefix(spec.get("pre_tokenizer"))
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _without_prefix(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer that adds no space before a text."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    found = dict(step)
    if "prepend_scheme" in found:
        found["prepend_scheme"] = "never"
    if "add_prefix_space" in found:
        found["add_prefix_space"] = False
    for key in ("normalizers", "pretokenizers"):
        if key in found:
            found[key] = [kept for one in found[key] if (kept := _without_prefix(one)) is not None]
    return found
