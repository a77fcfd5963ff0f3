"""Grammars of one model's answers that may call tools, for a format of calls other than Harmony."""

from __future__ import annotations

from collections.abc import Collection

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT, BadRequest
from moiety_platform.inference.calls_or_answers import ambiguity_of
from moiety_platform.inference.generation import Conversation
from moiety_platform.inference.strict_tools import (
    WrittenInput,
    check_inputs,
    grammar_of_calls,
    takes_any_arguments,
    written_input,
)
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import ModelCard


class CallGrammars:
    """Grammars of answers with calls in one model's format.

    `markers` are the markers of calls that are added tokens, with their ids. `text_ids` are the special tokens that
    may stand in free text beside calls.
    """

    def __init__(self, form: ToolFormat, tokenizer: Tokenizer, card: ModelCard, text_ids: Collection[int]) -> None:
        added = tokenizer.added_tokens
        self._form = form
        self._model = card.model
        self._follows_grammars = card.follows_grammars
        self.markers = {token.content: one for one, token in added.items() if token.content in form.markers}
        marks = frozenset(self.markers.values())
        self._free_ids = [
            one for one, token in sorted(added.items()) if one not in marks and (one in text_ids or not token.special)
        ]

    def grammar(
        self, prompt: Conversation, offer: ToolOffer, answer: GrammarSpec | None, *, ignore_eos: bool = False
    ) -> GrammarSpec | None:
        """Return the grammar of an answer that may call tools, or None for free text.

        `answer` is the grammar of an answer without calls. Raises BadRequest for a response format beside tools, for
        strict tools, and for grammars of custom tools that cannot be enforced.
        """
        if self._follows_grammars and not ignore_eos:
            check_inputs(offer, self._written_input)
        if answer is not None:
            self._check_beside(answer, offer)
        elif not self._is_held(offer, ignore_eos=ignore_eos or self._is_begun_unmarked(prompt)):
            return None
        if self._is_begun_unmarked(prompt):
            message = f"calls of the model {self._model!r} cannot be held to a schema here; leave 'strict' out"
            raise BadRequest(message, code=UNSUPPORTED_RESPONSE_FORMAT, param="tools")
        return grammar_of_calls(self._form, offer, self.markers, self._free_ids, answer)

    def follows_input(self, offer: ToolOffer, tool: Tool) -> bool:
        """Return whether calls can be held to the grammar of a custom tool's input."""
        is_free = takes_any_arguments(self._form, self.markers) or all(
            one.strict or self._has_input(one) for one in offer.tools
        )
        return self._follows_grammars and is_free and self._has_input(tool)

    def _has_input(self, tool: Tool) -> bool:
        return bool(self._written_input(tool).grammar)

    def _written_input(self, tool: Tool) -> WrittenInput:
        return written_input(tool, self._form, self.markers)

    def _is_begun_unmarked(self, prompt: Conversation) -> bool:
        """Return whether the client has begun an answer that would have to be a call from its beginning on."""
        return not self._form.marks_calls and bool(prompt.prefill.strip())

    def _is_held(self, offer: ToolOffer, *, ignore_eos: bool) -> bool:
        """Return whether the calls of an answer are held to a grammar.

        `ignore_eos`: the answer goes on where a grammar would end it, so only strict tools ask for one.
        """
        if offer.is_strict:
            return True
        if not self._follows_grammars or ignore_eos:
            return False
        if any(self.follows_input(offer, tool) for tool in offer.tools):
            return True
        is_one_call = offer.max_calls == 1 and self._form.marks_calls
        return (offer.must_call or is_one_call) and takes_any_arguments(self._form, self.markers)

    def _check_beside(self, answer: GrammarSpec, offer: ToolOffer) -> None:
        """Raise BadRequest for a response format that cannot stand beside tools."""
        why = "its engine does not support grammars"
        if self._follows_grammars:
            why = ambiguity_of(answer, self._form, offer, self.markers)
        if why:
            raise BadRequest(
                f"the model {self._model!r} does not support a response format together with tools; leave one of the "
                f"two out: {why}",
                code=UNSUPPORTED_RESPONSE_FORMAT,
            )
