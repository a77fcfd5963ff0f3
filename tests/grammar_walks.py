"""Answers drawn at random from a compiled grammar, token by token, without a model."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_wire.grammars import GrammarSpec

MAX_TOKENS = 1500
_CLOSING = frozenset(b'"}]')


class GrammarWalker:
    """Draws answers of one tokenizer. What does not end within MAX_TOKENS, or cannot end, is
    None."""

    def __init__(self, compiler: GrammarCompiler, tokens: Sequence[bytes], eos_token_ids: Collection[int]) -> None:
        self._compiler, self._tokens, self._eos_token_ids = compiler, tokens, frozenset(eos_token_ids)

    def draw_answer(
        self, grammar: GrammarSpec, draw: random.Random, begun: Sequence[int] = (), *, hurry_after: int = 40
    ) -> list[int] | None:
        """The tokens of an answer that begins with `begun`, without the one that ends it. Beyond `hurry_after` tokens
        it takes what closes strings, lists and objects where it may. Raises GrammarRefused."""
        matcher = self._compiler.compile(grammar)
        answer = list(begun)
        assert matcher.consume_tokens(answer), matcher.get_error()
        while len(answer) < MAX_TOKENS:
            if matcher.is_stopped():
                return answer
            allowed = _set_bits(matcher.compute_bitmask())
            if matcher.get_error().startswith("NoExtension"):
                return None  # what would have to follow refers to itself without an end; a request fails here
            assert not matcher.is_error(), matcher.get_error()
            assert allowed, "a grammar that has not ended allows a token"
            is_late = len(answer) - len(begun) > hurry_after
            ends = [token_id for token_id in allowed if token_id in self._eos_token_ids]
            if ends and (is_late or len(ends) == len(allowed) or draw.random() < 0.2):
                return answer
            allowed = [token_id for token_id in allowed if token_id not in self._eos_token_ids]
            closing = [token_id for token_id in allowed if self._closes(token_id)]
            token_id = draw.choice(closing if closing and (is_late or draw.random() < 0.3) else allowed)
            assert matcher.consume_token(token_id), matcher.get_error()
            answer.append(token_id)
        return None

    def _closes(self, token_id: int) -> bool:
        token = self._tokens[token_id]
        return len(token) == 1 and token[0] in _CLOSING


def _set_bits(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
