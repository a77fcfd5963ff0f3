"""Contents of a tokenizer.json for byte-level BPE and for sentencepiece's pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moiety_text.tokenizer_formats.patterns import byte_level, pre_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SPACE = "\u2581"  # sentencepiece's sign for a space


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before the text is split; a `special` one is left out of decoded texts."""

    id: int
    content: str
    special: bool = True

    def entry(self) -> dict[str, Any]:
        """Return the token's entry in a tokenizer.json."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {"id": self.id, "content": self.content, **flags, "special": self.special}


def byte_level_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Sequence[AddedToken],
    patterns: tuple[str, ...],
    *,
    whole_words: bool = False,
    first: AddedToken | None = None,
    composes: bool = False,
) -> dict[str, Any]:
    """Return the tokenizer of BPE over bytes.

    `whole_words`: words in the vocabulary are not merged from parts. `first`: token before every text. `composes`:
    texts are normalized to NFC.
    """
    model = {
        "type": "BPE",
        "vocab": dict(vocab),
        "merges": [list(pair) for pair in merges],
        "ignore_merges": whole_words,
    }
    return _tokenizer(
        model,
        added,
        normalizer={"type": "NFC"} if composes else None,
        pre_tokenizer=pre_tokenizer(patterns),
        post_processor=byte_level() if first is None else _with_first(first),
        decoder=byte_level(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieces:
    """Pieces of a sentencepiece model with their scores, and its rules. `first`: token before every text."""

    pieces: Sequence[tuple[str, float]]
    added: Sequence[AddedToken]
    unknown: str
    byte_fallback: bool
    adds_space: bool
    first: AddedToken | None = None


def sentencepiece_bpe(source: SentencePieces) -> dict[str, Any]:
    """Return the tokenizer of sentencepiece's BPE, whose merges follow from the pieces' scores."""
    vocab = {piece: number for number, (piece, _) in enumerate(source.pieces)}
    merges = _merges(vocab, source.pieces, {token.content for token in source.added})
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": source.unknown, "fuse_unk": True}
    return _sentencepiece(model, source)


def sentencepiece_unigram(source: SentencePieces) -> dict[str, Any]:
    """Return the tokenizer of sentencepiece's unigram model."""
    number = next(index for index, (piece, _) in enumerate(source.pieces) if piece == source.unknown)
    model = {"type": "Unigram", "unk_id": number, "vocab": [list(one) for one in source.pieces]}
    return _sentencepiece(model, source)


def _sentencepiece(model: dict[str, Any], source: SentencePieces) -> dict[str, Any]:
    adds_space, first = source.adds_space, source.first
    marks = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        model | {"byte_fallback": source.byte_fallback},
        source.added,
        normalizer={"type": "Sequence", "normalizers": [*marks, spaces]},
        pre_tokenizer=None,
        post_processor=None if first is None else _with_first(first),
        decoder={"type": "Sequence", "decoders": steps},
    )


def _merges(vocab: Mapping[str, int], pieces: Sequence[tuple[str, float]], added: set[str]) -> list[list[str]]:
    """Return the pairs that form a piece, those of the pieces with the highest scores first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in pieces:
        if piece in added:
            continue
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[left], vocab[right], left, right))
    by_piece = sorted(found, key=lambda one: one[0])  # pairs of one piece are in the order of their own pieces
    return [[left, right] for *_, left, right in by_piece]


def _with_first(token: AddedToken) -> dict[str, Any]:
    special, text = {"SpecialToken": {"id": token.content, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    described = {token.content: {"id": token.content, "ids": [token.id], "tokens": [token.content]}}
    pair = [special, text, special | {"SpecialToken": {"id": token.content, "type_id": 1}}, second]
    return {"type": "TemplateProcessing", "single": [special, text], "pair": pair, "special_tokens": described}


def _tokenizer(model: dict[str, Any], added: Sequence[AddedToken], **parts: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    usual |= {"fuse_unk": False, "byte_fallback": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token.entry() for token in sorted(added, key=lambda one: one.id)],
        **parts,
        "model": model if model["type"] == "Unigram" else usual | model,
    }
