"""Limits on the reasoning of models that write it between two markers: budgets, and grammars that begin after it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from moiety_text.chat import ChatTemplate
from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ReasonedGrammar
from moiety_wire.messages import MIN_THOUGHT_BUDGET, ThoughtBudget, ThoughtMarks


def closing_text(template: ChatTemplate, closer: str) -> str:
    """Return the text with which the model's reasoning is closed, with the white space that the template writes."""
    gap = "\n\n"
    return f"\n{closer}{gap}" if template.spells(closer + gap) else closer


def budget_of_markers(num_tokens: int, marks: ThoughtMarks, closing: str, tokenizer: Tokenizer) -> ThoughtBudget | None:
    """Return the budget of reasoning between markers; None where the tokenizer has no tokens for them."""
    ids = {token.content: one for one, token in tokenizer.added_tokens.items()}
    if marks.closer not in ids or (not marks.is_open and marks.opener not in ids):
        return None
    openers = () if marks.is_open else (ids[marks.opener],)
    closing_ids = tuple(tokenizer.encode(closing))
    return ThoughtBudget(max(num_tokens, MIN_THOUGHT_BUDGET), openers, (ids[marks.closer],), closing_ids)


def grammar_after_thought(
    grammar: GrammarSpec, marks: ThoughtMarks, tokenizer: Tokenizer, end_ids: Collection[int]
) -> GrammarSpec:
    """Return the grammar of an answer that may reason before what follows `grammar`. `end_ids` end an answer."""
    markers = (marks.opener, marks.closer)
    special = {token.content: one for one, token in tokenizer.added_tokens.items() if token.content in markers}
    banned_ids = sorted({*tokenizer.special_ids, *end_ids}.difference(special.values()))
    form = ReasonedGrammar(grammar, marks.opener, marks.closer, marks.is_open, special, banned_ids)
    return GrammarSpec(GrammarKind.REASONED, msgspec.json.encode(form).decode())
