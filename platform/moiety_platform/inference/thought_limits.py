"""Limits on the reasoning of models that write it between two markers: budgets, and grammars that begin after it."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import msgspec

from moiety_text.chat import ChatTemplate
from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ReasonedGrammar
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET, ThoughtBudget, ThoughtMarks

MAX_SPACES = 16  # characters that a grammar permits before the reasoning


def closing_text(template: ChatTemplate, closer: str) -> str:
    """Return the text with which the model's reasoning is closed, with the white space that the template writes."""
    gap = "\n\n"
    return f"\n{closer}{gap}" if template.spells(closer + gap) else closer


def budget_of_markers(
    num_tokens: int, marks: ThoughtMarks, closing: str, tokenizer: Tokenizer, space_ids: Collection[int]
) -> ThoughtBudget | None:
    """Return the budget of reasoning between markers; None where the tokenizer has no token for the closer.

    `space_ids`: see `space_tokens`.
    """
    ids = {token.content: one for one, token in tokenizer.added_tokens.items()}
    if marks.closer not in ids:
        return None
    openers = () if marks.is_open else tuple(tokenizer.encode(marks.opener))
    spaces = () if marks.is_open else tuple(sorted(space_ids))
    closing_ids = tuple(tokenizer.encode(closing))
    return ThoughtBudget(max(num_tokens, MIN_THOUGHT_BUDGET), openers, (ids[marks.closer],), closing_ids, spaces)


def space_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens of which up to 16 characters of white space consist: runs of one or two kinds, or any three."""
    texts = {"".join(one) for length in (1, 2, 3) for one in itertools.product(" \n\r\t", repeat=length)}
    for first, second in itertools.permutations(" \n\r\t", 2):
        texts |= {first * head + second * rest for head in range(1, 9) for rest in range(9)}
        texts |= {first * head for head in range(9, MAX_SPACES + 1)}
    found = {token_id for text in texts for token_id in tokenizer.encode(text)}
    return frozenset(one for one in found if not tokenizer.token_bytes(one).strip())


def grammar_after_thought(
    grammar: GrammarSpec, marks: ThoughtMarks, tokenizer: Tokenizer, end_ids: Collection[int]
) -> GrammarSpec:
    """Return the grammar of an answer that may reason before what follows `grammar`. `end_ids` end an answer."""
    added = {token.content: one for one, token in tokenizer.added_tokens.items() if token.content}
    special = {text: one for text, one in added.items() if text in marks.opener or text in marks.closer}
    banned_ids = sorted({*tokenizer.special_ids, *end_ids}.difference(special.values()))
    form = ReasonedGrammar(grammar, marks.opener, marks.closer, marks.is_open, special, banned_ids)
    return GrammarSpec(GrammarKind.REASONED, msgspec.json.encode(form).decode())
