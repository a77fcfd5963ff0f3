"""Content of a receipt: canonical JSON, hash chain, and commitments to tokens. Pure; writer and verifier share it.

A commitment is an HMAC of token ids under a random salt that is stored beside the receipt. Without the salt, which only
the receipt's owner gets, a receipt says nothing about the text; with it, anyone can check a claimed text against it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

GENESIS = "0" * 64
VERSION = 1
SIGNED = b"moiety receipt v1\n"  # prefix of the signed bytes, so that the key signs nothing else


class ReceiptDraft(msgspec.Struct, frozen=True):
    """Data of a receipt that only the gateway that served the request has; it travels with the usage row.

    `engines` has an entry for each different engine that computed a part of the answer.
    """

    salt: str  # in hexadecimal
    settings: dict[str, Any]  # that determine the answer
    engines: list[dict[str, Any]]
    rates: dict[str, int] | None  # nano-dollars per million tokens in the served class; None without a price
    prompts: list[str]  # commitments to the tokens of each prompt
    answers: list[str]  # commitments to the output tokens of each sequence


def commitment(salt: str, token_ids: Sequence[int]) -> str:
    """Return the commitment to token ids: HMAC-SHA256 over 32-bit little-endian integers, in hexadecimal."""
    data = array("I", token_ids)
    if data.itemsize != 4:
        data = array("L", token_ids)
    return hmac.new(bytes.fromhex(salt), data.tobytes(), hashlib.sha256).hexdigest()


def canonical(content: Mapping[str, Any]) -> bytes:
    """Return the content as JSON with sorted keys and without spaces, in UTF-8."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def hash_of(content: Mapping[str, Any]) -> str:
    """Return the hash of a receipt's content, which contains the hash of the receipt before it."""
    return hashlib.sha256(canonical(content)).hexdigest()


def signed_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes that a signature covers."""
    return SIGNED + canonical(content)
