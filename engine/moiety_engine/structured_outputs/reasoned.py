"""Grammar of outputs with free reasoning before an answer that follows a grammar of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moiety_engine.structured_outputs.calls import id_ranges
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.lark_text import quoted_with_tokens
from moiety_wire.grammars import GrammarSpec, ReasonedGrammar

ANSWER = "@after_reasoning"  # reference to the answer's grammar in the rules


def reasoned_of(spec: GrammarSpec) -> ReasonedGrammar:
    """Decode the spec's text. Raises GrammarRefused."""
    try:
        return msgspec.json.decode(spec.text, type=ReasonedGrammar)
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"the grammar with reasoning cannot be decoded: {exc}") from exc


def reasoned_rules(form: ReasonedGrammar) -> str:
    """Return the rules in Lark's syntax, which refer to the answer's grammar.

    The reasoning is any tokens, also parts of a character, since a budget may end it anywhere. A marker that is no
    added token is spelled by ordinary tokens. Then the reasoning is the shortest text that ends with the closer.
    """
    closer = quoted_with_tokens(form.closer, form.special)
    rules = ["SPACE: /[ \\t\\r\\n]{1,16}/"]
    if form.closer in form.special:
        rules += [tokens_but([*form.banned_ids, *form.special.values()]), f"thought: text {closer}"]
    else:
        rules += ["ANY: /(.|\\n)*/", f"closed[lazy]: ANY {closer}", "thought: closed"]
    opener = quoted_with_tokens(form.opener, form.special)
    start = "thought SPACE?" if form.is_open else f"(SPACE? {opener} thought SPACE?)?"
    return "\n".join([f"start: {start} {ANSWER}", *rules])


def tokens_but(banned_ids: Sequence[int]) -> str:
    """Return the rule `text`: any number of tokens but these."""
    return f"text: <[^{','.join(id_ranges(banned_ids))}]>*"


def with_grammars(rules: str, others: Mapping[str, str], name: str = "main") -> str:
    """Return the grammar for llguidance of rules that refer to others by their names.

    Each of the others is Lark's syntax, or what llguidance takes.
    """
    grammars: list[dict[str, Any]] = [{"name": name, "lark_grammar": rules}]
    for other, text in others.items():
        is_whole = text.lstrip()[:1] == "{"
        first, *more = msgspec.json.decode(text)["grammars"] if is_whole else [{"lark_grammar": text}]
        grammars += [{**first, "name": other}, *more]
    return msgspec.json.encode({"grammars": grammars}).decode()
