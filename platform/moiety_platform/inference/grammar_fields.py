"""Definitions of custom tools' grammars in request bodies, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT
from moiety_platform.inference.body_fields import refuse, shape_of
from moiety_platform.inference.escaped_grammars import MalformedGrammar
from moiety_platform.inference.input_grammars import check_well_formed

STORED_GRAMMAR_BYTES = 2**31 - 1  # limit of definitions that a client has sent before: they are not checked again


def _check_definition(value: str, info: ValidationInfo) -> str:
    num_bytes, most = len(value.encode(errors="replace")), shape_of(info).max_grammar_bytes
    if num_bytes > most:
        raise refuse(f"it has {num_bytes:,} bytes; it may have {most:,}")
    syntax = info.data.get("syntax")
    if syntax is not None and most < STORED_GRAMMAR_BYTES:
        try:
            check_well_formed(syntax, value)
        except MalformedGrammar as exc:
            message = f"it is no valid grammar in the syntax {syntax!r}: {exc}"
            raise refuse(message, UNSUPPORTED_RESPONSE_FORMAT) from exc
    return value


GrammarDefinition = Annotated[str, AfterValidator(_check_definition)]
"""Definition of a grammar, in a model whose field `syntax` comes before it."""
