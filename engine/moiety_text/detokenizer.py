"""Incremental detokenization that never splits a code point.

It knows no stop strings and no requests. Its output concatenates to the tokenizer's decode of all tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from moiety_text.marker_guards import SpelledMarkers
from moiety_text.tokenizer import Tokenizer


class Detokenizer:
    """Detokenizer of one sequence of tokens.

    Special tokens other than `shown_ids`, and ids that the tokenizer does not have (a model's padding of its
    vocabulary), have no text. Text that spells one of the added tokens `marker_ids` without that token is guarded, for
    a GuardedReader.
    """

    def __init__(self, tokenizer: Tokenizer, shown_ids: Collection[int] = (), marker_ids: Collection[int] = ()) -> None:
        self._find_token = tokenizer.find_token
        self._special_ids = tokenizer.special_ids.difference(shown_ids) if shown_ids else tokenizer.special_ids
        self._stages = tokenizer.new_stages()
        added = tokenizer.added_tokens
        self._markers = {one: added[one].content for one in marker_ids if one in added}
        self._spelled = SpelledMarkers(tuple(self._markers.values())) if self._markers else None

    def add(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; "" while a code point is unfinished."""
        if self._spelled is None:
            return self._decode(token_ids)
        guard, markers = self._spelled.guard, self._markers
        return "".join([guard(self._decode((one,)), markers.get(one)) for one in token_ids])

    def _decode(self, token_ids: Iterable[int]) -> str:
        pieces = [
            piece
            for token_id in token_ids
            if token_id not in self._special_ids and (piece := self._find_token(token_id)) is not None
        ]
        if not pieces:
            return ""
        for stage in self._stages:
            pieces = stage.feed(pieces)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the text still held back, at the end of the sequence."""
        text = ""
        for i, stage in enumerate(self._stages):
            pieces = stage.flush()
            for later in self._stages[i + 1 :]:
                pieces = later.feed(pieces)
            text += "".join(pieces)
        return text if self._spelled is None else self._spelled.guard(text)


class CharacterCount:
    """Counter of the characters that each token of a sequence completes in its text."""

    def __init__(self, tokenizer: Tokenizer, shown_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids.difference(shown_ids) if shown_ids else tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_begun = False

    def add(self, token_id: int) -> int:
        """Return the characters of the next token: 0 for one without text, and for the first parts of a code point."""
        if token_id in self._special_ids or self._tokenizer.find_token(token_id) is None:
            return 0
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if not self._has_begun:
            self._has_begun = True
            alone = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if text.endswith(alone):
                return len(alone)  # the decoder may omit the space before a text's first word
        return len(text)
