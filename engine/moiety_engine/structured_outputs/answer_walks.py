"""Trial of a grammar with long answers, before a request that uses it begins.

A few expressions need more work for each further character of an answer, such as `([a-z]+ ?){1,9000}`, which can
divide a text into words in many ways. A walk writes a long answer, with strings as long as they may be, and shows this.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

from llguidance import LLMatcher

MAX_STEPS = 40  # parts of an answer, each with one mask
MAX_WALK_S = 0.25  # processor time, after which a walk ends; a grammar that only takes long is not refused
_BYTES_OF_STEP = 32
_MAX_TOKEN_BYTES = 4
_STRING_STEPS = 12  # after which a walk ends a string
_LARGE = re.compile(r"(?:[{,~.]\s*|Length\\*\"\s*:\s*)(?:[5-9]\d|\d{3,})")


def has_large_counts(grammar: str) -> bool:
    """Return whether the text of a grammar may have repetitions or lengths that are worth a walk."""
    return _LARGE.search(grammar) is not None


class AnswerWalks:
    """Walks through grammars of one tokenizer."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Iterable[int]) -> None:
        """Choose the tokens of walks. `tokens`: the text of each token id."""
        special = frozenset(special_token_ids)
        ordinary = [i for i, token in enumerate(tokens) if 0 < len(token) <= _MAX_TOKEN_BYTES and i not in special]
        letters = [i for i in ordinary if tokens[i].isalpha() and tokens[i].islower()]
        single = [i for i in ordinary if len(tokens[i]) == 1 and tokens[i] not in (b'"', b"\\")]
        wide = [i for i in ordinary if len(tokens[i]) > 1 and tokens[i][0] > 0x7F]
        found = [*letters[:: len(letters) // 64 + 1], *wide[:: len(wide) // 16 + 1], *single]
        self._token_ids = list(dict.fromkeys(found))
        self._quote_ids = [i for i in ordinary if tokens[i] in (b'"', b'",', b'":', b'"}')]
        self._tokens = tokens

    def walk(self, matcher: LLMatcher) -> int:
        """Write an answer of `matcher`, which is used up. Returns its bytes; the matcher is in error at a limit."""
        num_bytes = num_string_steps = 0
        end_s = time.thread_time() + MAX_WALK_S
        for _ in range(MAX_STEPS):
            if matcher.is_stopped() or time.thread_time() > end_s:
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
            num_string_steps += 1
            is_long = num_string_steps >= _STRING_STEPS
            token_id = self._choose(mask, self._quote_ids if is_long else self._token_ids)
            if token_id is None:
                token_id = self._choose(mask, self._token_ids if is_long else self._quote_ids)
            if token_id is None:
                break
            if token_id in self._quote_ids:
                num_string_steps = 0
            size = len(self._tokens[token_id])
            times = 1 if token_id in self._quote_ids else _BYTES_OF_STEP // size
            num_taken = matcher.try_consume_tokens([token_id] * times)
            num_bytes += num_taken * size
            if num_taken == 0:
                break
        return num_bytes

    def _choose(self, mask: bytes, token_ids: Sequence[int]) -> int | None:
        allowed = [token_id for token_id in token_ids if mask[token_id >> 3] >> (token_id & 7) & 1]
        return allowed[0] if allowed else None
