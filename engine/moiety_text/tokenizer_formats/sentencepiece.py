"""Tokenizer of a sentencepiece model file (`tokenizer.model`), a protocol buffer with pieces, scores and settings.

The fields are those of https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto. Pieces of the
types BPE and unigram are read.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moiety_text.errors import UnusableTokenizer
from moiety_text.tokenizer_formats.tokenizer_json import (
    AddedToken,
    SentencePieces,
    sentencepiece_bpe,
    sentencepiece_unigram,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
_MAX_PIECES = 2_000_000


@dataclass(slots=True)
class SentencePieceModel:
    """Contents of a model file. `kinds`: the kind of each piece."""

    pieces: list[tuple[str, float]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    normalization: bytes = b""
    adds_space: bool = True
    joins_spaces: bool = True


def parse_model(data: bytes) -> SentencePieceModel:
    """Return the contents of a model file. Raises UnusableTokenizer if it is damaged."""
    model = SentencePieceModel()
    try:
        for number, value in _fields(data):
            if number == 1:
                _add_piece(model, _bytes(value))
            elif number == 2:
                for setting, content in _fields(_bytes(value)):
                    if setting == 3:
                        model.kind = int(content)
                    elif setting == 35:
                        model.byte_fallback = bool(content)
            elif number == 3:
                _add_normalization(model, _bytes(value))
    except (IndexError, TypeError, ValueError, struct.error) as exc:
        raise UnusableTokenizer(f"the sentencepiece model is damaged ({exc}); download it again") from exc
    if not model.pieces:
        raise UnusableTokenizer("the file is not a sentencepiece model: it has no pieces; download it again")
    return model


def sentencepiece_tokenizer(
    model: SentencePieceModel, added: Sequence[AddedToken], first: str | None
) -> dict[str, Any]:
    """Return the contents of a tokenizer.json.

    `added`: tokens besides the model's own special pieces. `first`: the token before every text. Raises
    UnusableTokenizer for other models than BPE and unigram, and for ids with gaps.
    """
    if model.kind not in (_UNIGRAM, _BPE) or _UNKNOWN not in model.kinds:
        raise UnusableTokenizer("the sentencepiece model is neither BPE nor unigram, or has no unknown piece")
    own = [
        AddedToken(number, piece, special=kind == _CONTROL)
        for number, ((piece, _), kind) in enumerate(zip(model.pieces, model.kinds, strict=True))
        if kind in (_CONTROL, _USER)
    ]
    tokens = {token.id: token for token in own} | {token.id: token for token in added}
    beyond = sorted(number for number in tokens if number >= len(model.pieces))
    if beyond != list(range(len(model.pieces), len(model.pieces) + len(beyond))):
        raise UnusableTokenizer(f"the added tokens' ids {beyond[:4]} … do not follow the {len(model.pieces)} pieces")
    pieces = [*model.pieces, *((tokens[number].content, 0.0) for number in beyond)]
    ids = {piece: number for number, (piece, _) in enumerate(pieces)}
    make = sentencepiece_bpe if model.kind == _BPE else sentencepiece_unigram
    made = make(
        SentencePieces(
            pieces=pieces,
            added=list(tokens.values()),
            unknown=model.pieces[model.kinds.index(_UNKNOWN)][0],
            byte_fallback=model.byte_fallback,
            adds_space=model.adds_space,
            first=AddedToken(ids[first], first) if first in ids else None,
        )
    )
    steps = made["normalizer"]["normalizers"]
    if model.joins_spaces:
        steps[:0] = [{"type": "Strip", "strip_left": True, "strip_right": True}, _joined_spaces()]
    if model.normalization:
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.normalization).decode()})
    return made


def _joined_spaces() -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


def _add_piece(model: SentencePieceModel, data: bytes) -> None:
    piece, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1:
            piece = _bytes(value).decode()
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = int(value)
    if len(model.pieces) >= _MAX_PIECES:
        raise ValueError(f"it has more than {_MAX_PIECES} pieces")
    model.pieces.append((piece, score))
    model.kinds.append(kind)


def _add_normalization(model: SentencePieceModel, data: bytes) -> None:
    for number, value in _fields(data):
        if number == 2:
            model.normalization = _bytes(value)
        elif number == 3:
            model.adds_space = bool(value)
        elif number == 4:
            model.joins_spaces = bool(value)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a message: integers, or the bytes of other values."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(data, at)
        else:
            if kind == _BYTES:
                length, at = _varint(data, at)
            elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
                length = 8 if kind == _EIGHT_BYTES else 4
            else:
                raise ValueError(f"a field has the wire type {kind}")
            if at + length > len(data):
                raise ValueError("it ends within a field")
            value, at = data[at : at + length], at + length
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number has more than ten bytes")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a field is a number where a text is expected")
    return value
