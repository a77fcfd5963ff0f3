"""Answers of models that use the Harmony format: their beginnings, their readers, and what the engine must know."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT, BadRequest
from moiety_platform.inference.answer_format import AnswerFormat
from moiety_platform.inference.generation import Conversation, Prompt
from moiety_platform.inference.strict_tools import check_inputs, input_in_json, tool_grammars
from moiety_text.harmony.format import ANALYSIS_OPENER, FINAL_OPENER, TURN_OPENER, HarmonyFormat
from moiety_text.harmony.reader import HarmonyReader
from moiety_text.tools.formats import Opening
from moiety_text.tools.offer import Tool
from moiety_wire.grammars import GrammarKind, GrammarSpec, HarmonyGrammar
from moiety_wire.messages import ModelCard
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET, ThoughtBudget, ThoughtMarks

_MARKS = ThoughtMarks(ANALYSIS_OPENER, FINAL_OPENER, is_open=True)  # stop strings act in the final channel only


class HarmonyAnswers:
    """Answers of one model in the Harmony format."""

    def __init__(self, form: HarmonyFormat, card: ModelCard) -> None:
        self._form = form
        self._end_ids = card.eos_token_ids
        self._shows_control_tokens = card.shows_special_tokens
        self._keeps_budgets = card.controls_reasoning
        self._by_grammar = card.controls_reasoning and card.follows_grammars  # of the whole format

    def opening(self, conversation: Conversation) -> Opening:
        """Return the beginning of the answer that is part of the prompt."""
        has_prefill = bool(conversation.prefill)
        return self._form.opening(conversation.tools, has_prefill=has_prefill, by_grammar=self._by_grammar)

    def new_reader(self, conversation: Conversation) -> HarmonyReader:
        return self._form.new_reader(conversation.tools, self.opening(conversation))

    def num_thought_tokens(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> int | None:
        """Return the number of reasoning tokens in the answers to a conversation; None for another prompt."""
        if not isinstance(prompt, Conversation):
            return None
        return 0 if prompt.prefill else sum(map(self._form.num_thought_tokens, answers))

    def answer_format(self, conversation: Conversation, grammar: GrammarSpec | None) -> AnswerFormat:
        """Return the format of the answers. Raises BadRequest for strict tools that cannot be enforced."""
        if not self._shows_control_tokens and conversation.tools is None:
            return AnswerFormat(grammar=grammar)  # channels cannot be told apart: all is content
        ids, is_begun = tuple(self._form.control_ids.values()), bool(conversation.prefill)
        return AnswerFormat(
            shown_ids=ids,
            marker_ids=ids,
            thought=None if is_begun else _MARKS,
            grammar=self._grammar(conversation, grammar),
            thought_budget=None if is_begun else self._budget(conversation),
            stop_token_ids=self._form.stop_ids,
        )

    def _grammar(self, conversation: Conversation, grammar: GrammarSpec | None) -> GrammarSpec | None:
        """Return the grammar of the whole answer; None where it is free."""
        offer = conversation.tools
        must_call, is_strict = (False, False) if offer is None else (offer.must_call, offer.is_strict)
        has_inputs = offer is not None and any(self.follows_input(tool) for tool in offer.tools)
        if offer is not None and self._by_grammar:
            check_inputs(offer, input_in_json)
        if grammar is not None and offer is not None and not self._by_grammar:
            raise BadRequest(
                "this model's engine does not support a response format together with tools; leave one of the two out",
                code=UNSUPPORTED_RESPONSE_FORMAT,
            )
        if conversation.prefill or (grammar is not None and not self._by_grammar):
            return grammar
        if is_strict and not self._by_grammar:
            raise BadRequest(
                "calls of this model cannot be held to a schema on its engine; leave 'strict' out",
                code=UNSUPPORTED_RESPONSE_FORMAT,
                param="tools",
            )
        if grammar is None and not is_strict and not has_inputs and not (must_call and self._by_grammar):
            return None
        tools = [] if offer is None else tool_grammars(offer, input_in_json)
        banned_ids = sorted({*self._form.tokenizer.special_ids, *self._end_ids})
        form = HarmonyGrammar(dict(self._form.control_ids), tools, grammar, must_call, banned_ids)
        return GrammarSpec(GrammarKind.HARMONY, msgspec.json.encode(form).decode())

    def follows_input(self, tool: Tool) -> bool:
        """Return whether calls can be held to the grammar of a custom tool's input."""
        return self._by_grammar and bool(input_in_json(tool).grammar)

    def _budget(self, conversation: Conversation) -> ThoughtBudget | None:
        if conversation.thought_budget is None or not self._keeps_budgets:
            return None
        encode = self._form.tokenizer.encode
        return ThoughtBudget(
            max(conversation.thought_budget, MIN_THOUGHT_BUDGET),
            tuple(encode(ANALYSIS_OPENER)),
            (self._form.end_id, *self._form.stop_ids),
            tuple(encode(self._form.closing_of(conversation.tools))),
            reopener_ids=tuple(encode(TURN_OPENER)),
        )
