"""A Hugging Face tokenizer.json: text to ids, ids to text, and the bytes of one token.

It knows no model: whether an id is within a model's vocabulary is not its business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import tokenizers

from moiety_text.decoding import Stage, build_stages, byte_level_bytes, flatten
from moiety_text.errors import TextNotEncodable, TokenOutOfRange, UnusableTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_speller(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """How this decoder turns one token of the model (not an added one) into bytes."""
    steps = {step["type"]: step for step in flatten(decoder)}
    if "ByteLevel" in steps:
        return byte_level_bytes
    if "WordPiece" in steps:
        prefix = steps["WordPiece"]["prefix"]
        return lambda token: (token[len(prefix) :] if token.startswith(prefix) else " " + token).encode()
    old, new = "", ""
    if "Metaspace" in steps:
        old, new = steps["Metaspace"]["replacement"], " "
    elif "BPEDecoder" in steps:
        old, new = steps["BPEDecoder"]["suffix"], " "
    elif "Replace" in steps:
        old, new = steps["Replace"]["pattern"]["String"], steps["Replace"]["content"]
    has_byte_tokens = "ByteFallback" in steps

    def spell(token: str) -> bytes:
        if has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return (token.replace(old, new) if old else token).encode()

    return spell


class Tokenizer:
    """Immutable once made; may be used from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> None:
        self._backend = backend
        self._decoder = decoder
        self._spell = _byte_speller(decoder)
        added = backend.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id; a model's own vocabulary may be padded beyond it."""

    @classmethod
    def from_json(cls, tokenizer_json: str) -> Self:
        """Raises UnusableTokenizer."""
        try:
            backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as exc:  # the library raises nothing narrower
            raise UnusableTokenizer(f"the tokenizer.json cannot be loaded: {exc}") from exc
        backend.no_truncation()
        backend.no_padding()
        decoder = json.loads(tokenizer_json).get("decoder")
        build_stages(decoder)  # so that an unknown decoder is refused now, not at the first token
        return cls(backend, decoder)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`; special tokens written out in it are recognised. Raises TextNotEncodable."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as exc:
            raise TextNotEncodable("the text holds half of a surrogate pair; send valid Unicode") from exc

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all of `ids`. Raises TokenOutOfRange."""
        for token_id in ids:
            self.token(token_id)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it. Raises TokenOutOfRange."""
        token = self.find_token(token_id)
        if token is None:
            raise TokenOutOfRange(
                f"token id {token_id} is not one of the tokenizer's, which are below {self.vocab_size}"
            )
        return token

    def find_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None if there is none."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for within a text, with the space before it if it starts a word.
        Raises TokenOutOfRange."""
        token = self.token(token_id)
        if token_id in self._added_ids:
            return token.encode()
        return self._spell(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a decoded text leaves this token out."""
        return token_id in self._special_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def new_stages(self) -> list[Stage]:
        """The steps that decode one text, for a Detokenizer."""
        return build_stages(self._decoder)
