"""Verification of receipts without a gateway: signatures, hashes, the links of a chain, and commitments. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moiety_platform.receipts.content import GENESIS, VERSION, commitment, hash_of
from moiety_platform.receipts.signing import ALGORITHM, is_signed, key_id_of

_SALT = re.compile(r"[0-9a-f]{32}", re.ASCII)


class InvalidReceipt(Exception):
    """A receipt does not hold. The message says which one and why."""


def public_keys_of(document: Any) -> dict[str, bytes]:
    """Return public keys by id, from the document of `/v1/receipts/keys`. Raises InvalidReceipt."""
    try:
        found = {}
        for one in document["keys"]:
            if (one["kty"], one["crv"]) == ("OKP", "Ed25519"):
                key = base64.urlsafe_b64decode(one["x"] + "=" * (-len(one["x"]) % 4))
                found[key_id_of(key)] = key
    except (KeyError, TypeError, ValueError, binascii.Error) as exc:
        raise InvalidReceipt("the keys are not in the form of /v1/receipts/keys: download them again") from exc
    if not found:
        raise InvalidReceipt("the document of keys has no Ed25519 key: give that of /v1/receipts/keys")
    return found


def check_receipt(envelope: Mapping[str, Any], keys: Mapping[str, bytes]) -> Mapping[str, Any]:
    """Return the content of a receipt whose hash and signature hold. Raises InvalidReceipt."""
    try:
        content, signature = envelope["receipt"], envelope["signature"]
        name = f"receipt {content['sequence']} ({content['request']['request_id']})"
        key_id, algorithm, value = signature["key_id"], signature["algorithm"], signature["value"]
        version, claimed = content["version"], envelope["hash"]
        if not isinstance(key_id, str) or not isinstance(content["sequence"], int):
            raise TypeError("a text and a number are needed")
        actual = hash_of(content)
    except (KeyError, TypeError, ValueError, RecursionError) as exc:
        raise InvalidReceipt("this is no receipt in the form of /v1/receipts/{request_id}") from exc
    if version != VERSION:
        raise InvalidReceipt(f"{name} has version {version}; this release verifies version {VERSION}")
    if claimed != actual:
        raise InvalidReceipt(f"{name} was changed: its hash is not that of its content")
    key = keys.get(key_id)
    if algorithm != ALGORITHM or key is None:
        raise InvalidReceipt(f"{name} is signed by the key {key_id!r}, which is not among the published keys")
    if not is_signed(content, value, key):
        raise InvalidReceipt(f"{name} was changed, or is not signed by the key {key_id!r}")
    checked: Mapping[str, Any] = content
    return checked


def check_chain(contents: Sequence[Mapping[str, Any]]) -> int:
    """Check the links between receipts of one tenant that follow each other; return the number of checked links.

    The first receipt of a chain must have no predecessor. Raises InvalidReceipt.
    """
    tenants = {content["request"]["tenant_id"] for content in contents}
    if len(tenants) > 1:
        raise InvalidReceipt(f"the receipts are of {len(tenants)} tenants: verify the chain of each one alone")
    by_number: dict[int, Mapping[str, Any]] = {}
    for content in contents:
        other = by_number.setdefault(content["sequence"], content)
        if other != content:
            raise InvalidReceipt(
                f"there are two receipts with the number {content['sequence']}: the chain forks. After a restore from "
                "a backup numbers are given again: verify the receipts from before and after it in separate files"
            )
    num_links = 0
    for number, content in by_number.items():
        before = by_number.get(number - 1)
        expected = GENESIS if number == 1 else None if before is None else hash_of(before)
        if expected is None:
            continue
        if content["previous"] != expected:
            raise InvalidReceipt(f"receipt {number} does not follow receipt {number - 1}: one of them is another one")
        num_links += 1
    return num_links


def missing_numbers(contents: Sequence[Mapping[str, Any]]) -> list[range]:
    """Return the numbers between the receipts that none of them has; from 1 on, if the first one is not given.

    They are those of other projects of the tenant, or of receipts that were removed.
    """
    missing, expected = [], 1
    for number in sorted({content["sequence"] for content in contents}):
        if number > expected:
            missing.append(range(expected, number))
        expected = number + 1
    return missing


def find_difference(
    envelope: Mapping[str, Any], prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> str | None:
    """Return which of these tokens are not those that the receipt commits to; None if all are.

    Raises InvalidReceipt for a receipt without commitments or without its salt.
    """
    committed, salt = envelope["receipt"]["commitments"], salt_of(envelope)
    if not committed or salt is None:
        raise InvalidReceipt(
            "the receipt has no commitments to tokens: ask for it with the request, by x-moiety-receipt: 1"
        )
    for name, claimed, given in (
        ("prompt", committed["prompts"], prompts),
        ("answer", committed["answers"], answers),
    ):
        if len(claimed) != len(given):
            return f"the receipt has {len(claimed)} {name}s, and {len(given)} are given"
        for number, (expected, token_ids) in enumerate(zip(claimed, given, strict=True)):
            try:
                found = commitment(salt, token_ids)
            except (OverflowError, TypeError) as exc:
                raise InvalidReceipt(f"{name} {number} has token ids that are no numbers from 0 to 2^32 - 1") from exc
            if found != expected:
                return f"{name} {number} differs: its {len(token_ids)} tokens are not those of the receipt"
    return None


def salt_of(envelope: Mapping[str, Any]) -> str | None:
    """Return the salt of a receipt's commitments; None without one. Raises InvalidReceipt for another value."""
    opening = envelope.get("opening")
    if opening is None:
        return None
    salt = opening.get("salt") if isinstance(opening, Mapping) else None
    if not isinstance(salt, str) or not _SALT.fullmatch(salt):
        raise InvalidReceipt("the salt of the receipt was changed: it must have 32 hexadecimal digits")
    return salt


def first_difference(before: Sequence[int], after: Sequence[int]) -> int | None:
    """Return the position of the first token that differs; None if all are equal."""
    for position, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return position
    return None if len(before) == len(after) else min(len(before), len(after))
