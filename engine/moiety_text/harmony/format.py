"""The Harmony format of one model: its control tokens, the beginnings of answers, and their readers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from moiety_text.chat import ChatTemplate
from moiety_text.harmony.reader import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    CONTROL_TOKENS,
    END,
    FUNCTIONS,
    MESSAGE,
    RETURN,
    START,
    HarmonyReader,
    MessageHeader,
)
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.formats import Opening
from moiety_text.tools.offer import ToolOffer

FINAL_OPENER = f"{CHANNEL}final{MESSAGE}"
ANALYSIS_OPENER = f"{CHANNEL}{ANALYSIS}{MESSAGE}"
TURN_OPENER = f"{START}assistant"
NEXT_TURN = END + TURN_OPENER
_TO_FUNCTION = f"{CHANNEL}{COMMENTARY} to={FUNCTIONS}"
_TO_ARGUMENTS = f" {CONSTRAIN}json{MESSAGE}"


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Answers of one model that uses the Harmony format. `control_ids`: its control tokens."""

    tokenizer: Tokenizer
    control_ids: Mapping[str, int]

    @property
    def end_id(self) -> int:
        """Token that ends a message, after which the answer goes on."""
        return self.control_ids[END]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self.control_ids[token] for token in (CALL, RETURN) if token in self.control_ids)

    def opening(self, offer: ToolOffer | None, *, has_prefill: bool, by_grammar: bool) -> Opening:
        """Return the beginning of an answer that the client has begun, or that must be a call.

        `by_grammar`: a grammar demands the call instead, so that the model may reason before it.
        """
        if has_prefill:
            return Opening(FINAL_OPENER)
        if offer is None or not offer.must_call or by_grammar:
            return Opening()
        name = offer.first_call
        return Opening(_TO_FUNCTION) if name is None else Opening(_TO_FUNCTION, name, _TO_ARGUMENTS)

    def new_reader(self, offer: ToolOffer | None, opening: Opening) -> HarmonyReader:
        """Return a reader for an answer to a prompt that ends with the opening."""
        names: Collection[str] = () if offer is None else offer.names
        reader = HarmonyReader(names, None if offer is None else offer.max_calls)
        deltas = reader.feed(opening.text)
        assert not deltas, "an opening ends before the text of its message"
        return reader

    def closing_of(self, offer: ToolOffer | None) -> str:
        """Return the text that ends the reasoning at the end of its budget, and begins what must follow it."""
        if offer is None:
            return NEXT_TURN + FINAL_OPENER
        return NEXT_TURN + self.opening(offer, has_prefill=False, by_grammar=False).text

    def num_thought_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the number of an answer's tokens in messages of the channel analysis, control tokens included."""
        ids = self.control_ids
        ends = {ids[token] for token in (END, CALL, RETURN) if token in ids}
        count = begin = 0
        is_thought = False
        for at, token_id in enumerate(token_ids):
            if token_id == ids[MESSAGE]:
                header = self.tokenizer.decode(token_ids[begin:at], skip_special_tokens=False)
                is_thought = MessageHeader.of(header).channel == ANALYSIS
            elif token_id in ends:
                count += at + 1 - begin if is_thought else 0
                begin, is_thought = at + 1, False
        return count + (len(token_ids) - begin if is_thought else 0)


def harmony_of(template: ChatTemplate, tokenizer: Tokenizer) -> HarmonyFormat | None:
    """Return the format of a model whose template writes the Harmony format; None for another one."""
    if not template.spells(FINAL_OPENER):
        return None
    ids = {token.content: one for one, token in tokenizer.added_tokens.items() if token.content in CONTROL_TOKENS}
    if ids.keys() < {*CONTROL_TOKENS} - {RETURN}:
        return None
    return HarmonyFormat(tokenizer, ids)
