"""What the text of an answer must be: a guide travels with its request, and the engine lets no other token through."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_GUIDE_BYTES = 256 * 1024  # of its text; gateways allow less


class GuideKind(StrEnum):
    """What the text of a guide is."""

    JSON_OBJECT = "json_object"  # nothing: any JSON object will do
    JSON_SCHEMA = "json_schema"  # a JSON schema
    REGEX = "regex"  # a regular expression that the whole answer matches
    CHOICE = "choice"  # a JSON list of strings, one of which the answer is
    GRAMMAR = "grammar"  # a grammar in Lark's form
    CALLS = "calls"  # a grammar in Lark's form, of the calls of tools that the gateway has made it of


class Guide(msgspec.Struct, frozen=True, array_like=True):
    """The same guide is compiled once an engine, however many requests have it."""

    kind: GuideKind
    text: str = ""
