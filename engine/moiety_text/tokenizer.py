"""Tokenizer of a Hugging Face tokenizer.json: text to ids, ids to text, and the bytes of one token.

It knows no model: it does not check ids against a model's vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import tokenizers

from moiety_text.decoding import Stage, build_stages, byte_level_bytes, flatten
from moiety_text.errors import TextNotEncodable, TokenOutOfRange, TooManyTokens, UnusableTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHRINKING = 4  # largest factor by which a normalizer listed here shortens a text, in bytes
_KEEPING_NORMALIZERS = frozenset({"NFC", "NFD", "Prepend", "ByteLevel"})
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "Sequence"})


def _byte_speller(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """Return the function with which this decoder turns one token of the model (not an added one) into bytes."""
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


def _most_bytes_a_token(spec: Mapping[str, Any], backend: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token can represent; None if there is no bound or none is known."""
    vocab = backend.get_vocab(with_added_tokens=False)
    splitters = list(_nested(spec.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_nested(spec.get("normalizer"), "normalizers"))
    added = backend.get_added_tokens_decoder().values()
    byte_level = any(step["type"] == "ByteLevel" for step in (*splitters, *normalizers))
    no_unknown = byte_level or (spec["model"].get("byte_fallback") and all(f"<0x{b:02X}>" in vocab for b in range(256)))
    keeps_text = (
        all(step["type"] in _KEEPING_SPLITTERS and step.get("behavior") != "Removed" for step in splitters)
        and all(step["type"] in _KEEPING_NORMALIZERS or _keeps_length(step) for step in normalizers)
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if spec["model"]["type"] != "BPE" or not no_unknown or not keeps_text:
        return None
    most = max((len(token) if byte_level else len(token.encode()) for token in vocab), default=1)
    most = max([most, *(len(token.content.encode()) for token in added)])
    return most * (_SHRINKING if any(step["type"] == "NFC" for step in normalizers) else 1)


def _nested(step: Mapping[str, Any] | None, children: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    return [part for child in step[children] for part in _nested(child, children)] if children in step else [step]


def _keeps_length(step: Mapping[str, Any]) -> bool:
    old = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
    return old is not None and len(step["content"].encode()) >= len(old.encode())


def _shares(room: int, lengths: Sequence[int]) -> list[int]:
    """Return how many tokens of one or two texts are kept; the longer text loses tokens first."""
    if len(lengths) == 1:
        return [min(room, lengths[0])]
    first, second = lengths
    kept = min(first, max(room - second, (room + 1) // 2))
    return [kept, min(second, room - kept)]


class Tokenizer:
    """A tokenizer. Immutable and thread-safe."""

    def __init__(
        self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None, most_bytes_a_token: int | None
    ) -> None:
        self._backend = backend
        self._decoder = decoder
        self._spell = _byte_speller(decoder)
        self._most_bytes_a_token = most_bytes_a_token
        self.added_tokens: Mapping[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        added = self.added_tokens
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest id; a model's own vocabulary may be padded beyond it."""

    @classmethod
    def from_json(cls, tokenizer_json: str) -> Self:
        """Load a tokenizer. Raises UnusableTokenizer."""
        try:
            backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as exc:  # the library raises nothing narrower
            raise UnusableTokenizer(f"the tokenizer.json cannot be loaded: {exc}") from exc
        backend.no_truncation()
        backend.no_padding()
        spec = json.loads(tokenizer_json)
        decoder = spec.get("decoder")
        build_stages(decoder)  # refuse an unknown decoder now, not at the first token
        return cls(backend, decoder, _most_bytes_a_token(spec, backend))

    def encode(self, text: str, *, add_special_tokens: bool = False, max_tokens: int | None = None) -> list[int]:
        """Return the ids of `text`; special tokens spelled in it are recognized.

        There may be more than `max_tokens`; but where that is certain without encoding, raises TooManyTokens. Raises
        TextNotEncodable.
        """
        self.check_fits(text, max_tokens)
        try:  # as a batch: only that releases the interpreter's lock
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as exc:
            raise TextNotEncodable("the text contains half of a surrogate pair; send valid Unicode") from exc

    def encode_pair(self, first: str, second: str, *, max_tokens: int | None = None) -> tuple[list[int], int]:
        """Return the ids of two texts with special tokens, and the index of the first token of the second segment.

        The index is 0 where the tokenizer does not mark segments. Raises as `encode` does.
        """
        self.check_fits(first, max_tokens)
        self.check_fits(second, max_tokens)
        try:
            (encoding,) = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        except TypeError as exc:
            raise TextNotEncodable("the text contains half of a surrogate pair; send valid Unicode") from exc
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def encode_truncated(
        self, first: str, second: str | None, max_tokens: int, *, from_left: bool = False
    ) -> tuple[list[int], int]:
        """Return the ids of a text or a pair, as `encode_pair` does, of at most `max_tokens`, special ones included.

        The ends of the texts are cut off, or with `from_left` their beginnings, that of the longer text first. Raises
        TextNotEncodable, and TooManyTokens if not even one token of each text fits.
        """
        room = max_tokens - self._backend.num_special_tokens_to_add(second is not None)
        texts = [first] if second is None else [first, second]
        if room < len(texts):
            raise TooManyTokens(max_tokens - room + len(texts))
        try:
            parts = self._backend.encode_batch(texts, add_special_tokens=False)
        except TypeError as exc:
            raise TextNotEncodable("the text contains half of a surrogate pair; send valid Unicode") from exc
        for part, num_kept in zip(parts, _shares(room, [len(part.ids) for part in parts]), strict=True):
            part.truncate(num_kept, direction="left" if from_left else "right")
        encoding = self._backend.post_process(parts[0], None if second is None else parts[1], add_special_tokens=True)
        types = encoding.type_ids
        return encoding.ids, types.index(1) if second is not None and 1 in types else 0

    def check_fits(self, text: str, max_tokens: int | None) -> None:
        """Raise TooManyTokens if `text` is too long for `max_tokens`, however it is encoded."""
        if max_tokens is None or self._most_bytes_a_token is None:
            return
        most_bytes = max_tokens * self._most_bytes_a_token
        if len(text) * 4 > most_bytes and (num_bytes := len(text.encode(errors="replace"))) > most_bytes:
            raise TooManyTokens(-(-num_bytes // self._most_bytes_a_token))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all of `ids`. Raises TokenOutOfRange."""
        for token_id in ids:
            self.token(token_id)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """Return the token's spelling in the vocabulary. Raises TokenOutOfRange."""
        token = self.find_token(token_id)
        if token is None:
            raise TokenOutOfRange(
                f"token id {token_id} is not in the tokenizer's vocabulary, 0 to below {self.vocab_size}"
            )
        return token

    def find_token(self, token_id: int) -> str | None:
        """Return the token's spelling in the vocabulary; None if there is none."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text, with the space before it if it starts a word.

        Raises TokenOutOfRange.
        """
        token = self.token(token_id)
        if token_id in self._added_ids:
            return token.encode()
        return self._spell(token)

    def is_special(self, token_id: int) -> bool:
        """Return whether a decoded text omits this token."""
        return token_id in self._special_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def new_stages(self) -> list[Stage]:
        """Return the stages that decode one text, for a Detokenizer."""
        return build_stages(self._decoder)
