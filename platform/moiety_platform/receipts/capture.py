"""Data of a receipt from a request that ends, if its client asked for one."""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from moiety_platform.errors import BadRequest
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.receipts.content import ReceiptDraft, commitment
from moiety_platform.usage.attribution import tags_of
from moiety_wire.messages import ModelCard

RECEIPT_HEADER = "x-moiety-receipt"
RECEIPT_FIELD = RECEIPT_HEADER.encode()
RECEIPT_TAG = "moiety_receipt"  # in the body's metadata, for APIs and batches without a header
WANTED = "1"
_HEADER = re.compile(r"1(?:\s*;\s*salt=([0-9a-f]{32}))?", re.ASCII)


def wants_receipt(record: RequestRecord) -> bool:
    """Return whether the request asks for a receipt, by its header or its metadata.

    A request that failed before its header was checked can have one that is not valid; it gets no receipt.
    """
    field = record.fields.get(RECEIPT_FIELD)
    if field is not None:
        return _match(field) is not None
    tags = record.attribution.tags
    return tags is not None and RECEIPT_TAG in tags and tags_of(tags).get(RECEIPT_TAG) == WANTED


def salt_of(field: bytes) -> str | None:
    """Return the salt that the header names, for a recomputation; None for a new one. Raises BadRequest."""
    match = _match(field)
    if match is None:
        raise BadRequest(
            f"The header {RECEIPT_HEADER} must be 1, or 1 and a salt of 32 hexadecimal digits, such as "
            f"'1; salt={'0' * 32}'.",
            code="invalid_receipt_header",
            param=RECEIPT_HEADER,
        )
    return match[1]


def _match(field: bytes) -> re.Match[str] | None:
    return _HEADER.fullmatch(field.decode("latin-1").strip(" \t"))


def draft_of(record: RequestRecord) -> ReceiptDraft:
    """Return the data of a request's receipt, with a new salt unless the request names one."""
    field = record.fields.get(RECEIPT_FIELD)
    salt = (None if field is None else salt_of(field)) or secrets.token_hex(16)
    price = record.reservation.prices.get(record.service_class)
    rates = None
    if price is not None:
        rates = {"input": price.input, "cached_input": price.cached_input, "output": price.output}
    return ReceiptDraft(
        salt=salt,
        settings=_settings_of(record),
        engines=_engines_of(record),
        rates=rates,
        prompts=[commitment(salt, token_ids) for token_ids in record.prompt_ids],
        answers=[commitment(salt, token_ids) for token_ids in record.output_ids],
    )


def _settings_of(record: RequestRecord) -> dict[str, Any]:
    """Return the settings that determine the answer, given the prompt's tokens and the engine."""
    generation = record.generation
    if generation is None:
        return {}
    sampling: dict[str, Any] = msgspec.to_builtins(generation.sampling, str_keys=True)  # the keys that JSON has
    return {
        "sampling": {"seed": None, **sampling},
        "num_choices": generation.num_choices,
        "max_tokens": generation.max_tokens,
        "min_tokens": generation.min_tokens,
        "stop": list(generation.stop),
        "stop_token_ids": list(generation.stop_token_ids),
        "ignore_eos": generation.ignore_eos,
        "has_grammar": generation.grammar is not None,
    }


def _engines_of(record: RequestRecord) -> list[dict[str, Any]]:
    """Return what determines the arithmetic of each different engine that had a part of the request."""
    found: list[dict[str, Any]] = []
    for client, _ in record.sequences:
        card = client.state.card
        if card is not None and (shown := _arithmetic_of(card)) not in found:
            found.append(shown)
    return found


def _arithmetic_of(card: ModelCard) -> dict[str, Any]:
    return {
        "model": card.model,
        "model_digest": card.model_digest or None,
        "family": card.family,
        "dtype": card.dtype,
        "device": card.device.partition(":")[0],
        "layout": card.layout or None,
        "batch_invariant": card.batch_invariant,
    }
