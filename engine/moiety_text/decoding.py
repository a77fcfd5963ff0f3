"""Incremental stages of a tokenizer.json decoder.

A Hugging Face decoder is defined on a whole list of tokens; a stage here returns, piece by piece, text that
concatenates to the same result. It holds back only what later tokens can still change, and releases that on `flush`. It
knows no token ids and no special tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from moiety_text.errors import UnusableTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Stage(Protocol):
    """One step of a decoder: token strings in, token strings out."""

    def feed(self, pieces: list[str]) -> list[str]: ...

    def flush(self) -> list[str]: ...


class _Each:
    """A stage that handles each token independently."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._change(piece) for piece in pieces]

    def flush(self) -> list[str]:
        return []


class _FirstAndRest:
    """A stage that handles the first token differently."""

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._first, self._rest = first, rest
        self._started = False

    def feed(self, pieces: list[str]) -> list[str]:
        if not pieces:
            return []
        changed = [self._rest(piece) for piece in pieces]
        if not self._started:
            changed[0] = self._first(pieces[0])
            self._started = True
        return changed

    def flush(self) -> list[str]:
        return []


class _AllButLast:
    """A stage that handles the last token differently, so it lags one token behind."""

    def __init__(self, last: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._last, self._rest = last, rest
        self._held: list[str] = []

    def feed(self, pieces: list[str]) -> list[str]:
        pieces = self._held + pieces
        self._held = pieces[-1:]
        return [self._rest(piece) for piece in pieces[:-1]]

    def flush(self) -> list[str]:
        held, self._held = self._held, []
        return [self._last(piece) for piece in held]


class _ByteLevel:
    """A stage from GPT-2's alphabet of printable characters to bytes, and from bytes to text."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, pieces: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join([byte_level_bytes(piece) for piece in pieces]))]

    def flush(self) -> list[str]:
        return [self._utf8.decode(b"", True)]


class _ByteFallback:
    """A stage from `<0xE4>` tokens to characters.

    A run of byte tokens counts only as a whole: if it is not UTF-8, each of its bytes becomes U+FFFD, so a run is held
    back until it ends.
    """

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, pieces: list[str]) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            byte = _BYTE_TOKEN.fullmatch(piece) if len(piece) == 6 else None
            if byte:
                self._run.append(int(byte[1], 16))
            else:
                if self._run:
                    out += self.flush()
                out.append(piece)
        return out

    def flush(self) -> list[str]:
        run, self._run = bytes(self._run), bytearray()
        try:
            return [run.decode()]
        except UnicodeDecodeError:
            return [_REPLACEMENT] * len(run)


class _StripWhole:
    """`Strip` after the tokens were fused: removes `content` from the ends of the whole text.

    Removes it at most `start` and `stop` times.
    """

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._tail = ""

    def feed(self, pieces: list[str]) -> list[str]:
        text = self._tail + "".join(pieces)
        while self._start and text:
            if not text.startswith(self._content):
                self._start = 0
                break
            text = text[1:]
            self._start -= 1
        keep = len(text)
        while len(text) - keep < self._stop and keep and text[keep - 1] == self._content:
            keep -= 1
        self._tail = text[keep:]
        return [text[:keep]]

    def flush(self) -> list[str]:
        self._tail = ""
        return []


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: itself where printable, otherwise from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(rest)}


BYTE_OF_CHARACTER = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level token; an added token, outside of that alphabet, is its own text."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


def _tidy(text: str) -> str:
    """Apply the clean-up of WordPiece decoders to one token with its space."""
    for spaced, tidy in (
        (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
        (" 'm", "'m"), (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
    ):  # fmt: skip
        text = text.replace(spaced, tidy)
    return text


def _replace(spec: Mapping[str, Any]) -> Stage:
    old, new = spec["pattern"].get("String"), spec["content"]
    if old is None:
        raise UnusableTokenizer("its decoder replaces by a regular expression, which is not supported here")
    return _Each(lambda piece: piece.replace(old, new))


def _metaspace(spec: Mapping[str, Any]) -> Stage:
    mark = spec["replacement"]
    never = spec.get("prepend_scheme", "always") == "never"

    def spaced(piece: str) -> str:
        return piece.replace(mark, " ")

    return _Each(spaced) if never else _FirstAndRest(lambda piece: piece.replace(mark, ""), spaced)


def _word_piece(spec: Mapping[str, Any]) -> Stage:
    prefix = spec["prefix"]
    finish: Callable[[str], str] = _tidy if spec.get("cleanup") else str

    def rest(piece: str) -> str:
        return finish(piece[len(prefix) :] if piece.startswith(prefix) else " " + piece)

    return _FirstAndRest(finish, rest)


def _bpe(spec: Mapping[str, Any]) -> Stage:
    suffix = spec["suffix"]
    return _AllButLast(lambda piece: piece.replace(suffix, ""), lambda piece: piece.replace(suffix, " "))


def _strip_each(content: str, start: int, stop: int) -> Stage:
    def strip(piece: str) -> str:
        begin, end = 0, len(piece)
        while begin < min(start, len(piece)) and piece[begin] == content:
            begin += 1
        while len(piece) - end < stop and end > begin and piece[end - 1] == content:
            end -= 1
        return piece[begin:end]

    return _Each(strip)


_SIMPLE: dict[str, Callable[[Mapping[str, Any]], Stage]] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "BPEDecoder": _bpe,
    "ByteLevel": lambda spec: _ByteLevel(),
    "ByteFallback": lambda spec: _ByteFallback(),
}


def flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the decoder of a tokenizer.json as a list of plain steps."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in flatten(inner)]
    return [decoder]


def build_stages(decoder: Mapping[str, Any] | None) -> list[Stage]:
    """Return new stages for one text. Raises UnusableTokenizer for an unsupported decoder."""
    if decoder is None:  # tokens separated by spaces
        return [_FirstAndRest(str, lambda piece: " " + piece)]
    stages: list[Stage] = []
    fused = False
    for spec in flatten(decoder):
        kind = spec["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip":
            strip = _StripWhole if fused else _strip_each
            stages.append(strip(spec["content"], spec["start"], spec["stop"]))
        elif kind in _SIMPLE and not fused:
            stages.append(_SIMPLE[kind](spec))
            fused = kind == "ByteLevel"
        elif kind in ("Replace",) and len(spec["pattern"].get("String", "xx")) == 1:
            stages.append(_SIMPLE[kind](spec))  # a single character is never split over pieces
        else:
            known = ", ".join([*sorted(_SIMPLE), "Fuse", "Strip"])
            place = " after the tokens were fused" if fused else ""
            raise UnusableTokenizer(f"its decoder has an unsupported step {kind!r}{place}; supported are {known}")
    return stages
