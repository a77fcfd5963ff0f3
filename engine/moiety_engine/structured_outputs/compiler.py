"""Guides compiled for one tokenizer, each once, within bounds of time and memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path

import structlog
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from moiety_engine.structured_outputs.errors import GuideRefused
from moiety_engine.structured_outputs.grammar import grammar_of
from moiety_engine.structured_outputs.state import TOO_COSTLY, GrammarState
from moiety_text.errors import TextError
from moiety_text.folder import read_text_model
from moiety_wire.guides import MAX_GUIDE_BYTES, Guide

log = structlog.get_logger()

MAX_KEPT = 256
MAX_KEPT_BYTES = 8 * 2**20  # of their text
MAX_FIRST_S = 0.5  # of a processor's time, to compile and to find the first tokens
MAX_TOLD_CHARS = 500

_LIMITS = LLParserLimits(
    max_items_in_row=10_000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """May be used from several threads. Compiling leaves the interpreter free for others."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> None:
        """Raises ValueError where the tokenizer is none that guides can be followed with."""
        if not eos_token_ids:
            raise ValueError("the model names no token that ends an answer")
        self._tokenizer = LLTokenizer(tokenizer_json, eos_token=list(eos_token_ids))
        self.num_words = -(-self._tokenizer.vocab_size // 32)  # of 32 tokens each, in a mask
        self._kept: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def read(cls, folder: Path) -> GrammarCompiler:
        """Of a checkpoint. Raises ValueError and moiety_text's errors."""
        text = read_text_model(folder)
        return cls(text.tokenizer_json, text.eos_token_ids)

    def open(self, guide: Guide) -> GrammarState:
        """For one answer. Raises GuideRefused."""
        with self._lock:
            matcher = self._kept.get(guide)
            if matcher is not None:
                self._kept.move_to_end(guide)
        if matcher is None:
            matcher = self._compiled(guide)
            with self._lock:
                self._kept[guide] = matcher
                self._drop_oldest()
        return GrammarState(matcher.deep_copy())

    def _compiled(self, guide: Guide) -> LLMatcher:
        if len(guide.text.encode()) > MAX_GUIDE_BYTES:
            raise GuideRefused(f"it has more than {MAX_GUIDE_BYTES:,} bytes")
        begin_s = time.thread_time()
        matcher = LLMatcher(self._tokenizer, grammar_of(guide), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # now, and not in a step: what is slow shows, and what follows is found faster
        if matcher.is_error():
            raise GuideRefused(_told(matcher.get_error()))
        if time.thread_time() - begin_s > MAX_FIRST_S:
            raise GuideRefused(TOO_COSTLY)
        return matcher

    def _drop_oldest(self) -> None:
        num_bytes = sum(len(guide.text) for guide in self._kept)
        while len(self._kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES:
            guide, _ = self._kept.popitem(last=False)
            num_bytes -= len(guide.text)


class Reading:
    """A library being read beside other work, since large vocabularies take a second."""

    def __init__(self, folder: Path) -> None:
        self._found: GrammarCompiler | str = ""
        self._thread = threading.Thread(target=self._read, args=(folder,), name="guides-library", daemon=True)
        self._thread.start()

    def result(self) -> GrammarCompiler | str:
        """Or why there is none."""
        self._thread.join()
        if isinstance(self._found, str):
            log.warning("guides_unavailable", reason=self._found)
        return self._found

    def _read(self, folder: Path) -> None:
        try:
            self._found = GrammarCompiler.read(folder)
        except (ValueError, TextError) as exc:
            self._found = str(exc)


def _told(error: str) -> str:
    """The library's complaint in one sentence, as far as clients can use it."""
    line = error.replace("<non-verbose/>", "").strip().split("\n")[0]
    if line.startswith("NoExtension"):
        return "nothing can ever fulfil it, for instance since it refers to itself without an end"
    return line[:MAX_TOLD_CHARS]
