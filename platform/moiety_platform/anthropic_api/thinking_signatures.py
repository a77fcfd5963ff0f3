"""Signatures of thinking blocks. They are not verified, but one may hold the text of a block without it."""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b

_TEXT_SIGNATURE = "text:"


def signature_of(thinking: str) -> str:
    """Return the signature of a thinking block: a digest of its text. Signatures are not verified."""
    digest = blake2b(thinking.encode(errors="replace"), digest_size=24).digest()
    return base64.b64encode(digest).decode()


def omitted_signature_of(thinking: str) -> str:
    """Return the signature of a thinking block that is returned without its text. It holds the text."""
    return _TEXT_SIGNATURE + base64.b64encode(thinking.encode(errors="replace")).decode()


def text_of_signature(signature: str) -> str:
    """Return the text in a signature, or an empty one if there is none."""
    if not signature.startswith(_TEXT_SIGNATURE):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_TEXT_SIGNATURE), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
