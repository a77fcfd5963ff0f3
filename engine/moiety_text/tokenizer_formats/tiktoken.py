"""Tokenizer of a tiktoken file: lines with a token's bytes in base64 and its rank, which is its id.

A pair of adjacent tokens is merged if their bytes are a token, the one of the lowest rank first.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, Any

from moiety_text.errors import UnusableTokenizer
from moiety_text.tokenizer_formats.tokenizer_json import AddedToken, byte_level_bpe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")
_MAX_TOKENS, _MAX_TOKEN_BYTES = 2_000_000, 4096


def is_tiktoken(data: bytes) -> bool:
    """Return whether a file's contents begin like a tiktoken file."""
    return _LINE.fullmatch(data[: _MAX_TOKEN_BYTES * 2].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def parse_ranks(data: bytes) -> dict[bytes, int]:
    """Return the ranks by the tokens' bytes. Raises UnusableTokenizer if the file is damaged."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            if not token or len(token) > _MAX_TOKEN_BYTES or len(ranks) >= _MAX_TOKENS or token in ranks:
                raise ValueError("a token is empty, too long, or occurs twice, or there are too many")
            ranks[token] = int(rank)
        except (ValueError, binascii.Error) as exc:
            raise UnusableTokenizer(
                f"line {number} of the tiktoken file is damaged ({exc}); download it again"
            ) from exc
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UnusableTokenizer("the ranks of the tiktoken file have gaps or repeat; download it again")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise UnusableTokenizer(f"the tiktoken file has no token for the byte {missing}; download it again")
    return ranks


def tiktoken_tokenizer(
    ranks: Mapping[bytes, int], named: Sequence[AddedToken], patterns: tuple[str, ...], first: str | None
) -> dict[str, Any]:
    """Return the contents of a tokenizer.json. Ids between the ranks and the named tokens are reserved tokens.

    `first`: the token before every text, if there is one.
    """
    added = {token.id: token for token in named if token.id >= len(ranks)}
    for number in range(len(ranks), max(added, default=0)):
        added.setdefault(number, AddedToken(number, f"<|reserved_token_{number}|>"))
    spelling = _characters()
    vocab = {"".join(spelling[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = [
        tuple("".join(spelling[byte] for byte in part) for part in pair)
        for token, _ in sorted(ranks.items(), key=lambda one: one[1])
        for pair in _pairs(token, ranks)
    ]
    ids = {token.content: token.id for token in added.values()}
    return byte_level_bpe(
        vocab | ids,
        [(left, right) for left, right in merges],
        list(added.values()),
        patterns,
        whole_words=True,
        first=AddedToken(ids[first], first) if first in ids else None,
    )


def _pairs(token: bytes, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that form a token."""
    pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
    found = [(left, right) for left, right in pairs if left in ranks and right in ranks]
    return sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _characters() -> list[str]:
    """Return the character of each byte in byte-level vocabularies: itself if printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
