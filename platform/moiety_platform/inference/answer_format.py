"""Properties of the answers to one prompt."""

from __future__ import annotations

import msgspec

from moiety_wire.grammars import GrammarSpec
from moiety_wire.thought_budget import ThoughtBudget, ThoughtMarks


class AnswerFormat(msgspec.Struct, frozen=True):
    """Properties of the answers to one prompt that the engine and the answer's parser depend on."""

    shown_ids: tuple[int, ...] = ()  # special tokens that the answer's text must contain for its parser
    marker_ids: tuple[int, ...] = ()  # added tokens that mark tool calls and reasoning in the answer
    thought: ThoughtMarks | None = None  # markers of the reasoning that the answer may begin with
    grammar: GrammarSpec | None = None  # grammar of the answer
    thought_budget: ThoughtBudget | None = None
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an answer of this format
