"""Grammars in EBNF with rules `name ::= …` (GBNF of llama.cpp, `ebnf` of SGLang), converted to Lark's format."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from moiety_engine.structured_outputs.errors import GrammarRefused

_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)


def as_lark(text: str) -> str:
    """Return a client's grammar in Lark's format, in which it may be already. Raises GrammarRefused."""
    if _RULE.search(text) is None:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as exc:  # the library raises this type for rules that are missing, beside its own
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise GrammarRefused(f"the EBNF grammar cannot be read: {reason}; its first rule must be `root ::= …`") from exc
