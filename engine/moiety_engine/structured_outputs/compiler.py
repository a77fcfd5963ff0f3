"""Compilation of grammars for one tokenizer.

Clients' grammars are compiled only in separate processes (`worker_child`), since native code may crash or not end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from moiety_engine.structured_outputs.answer_walks import AnswerWalks, has_large_counts
from moiety_engine.structured_outputs.costly_parts import too_costly
from moiety_engine.structured_outputs.ebnf import as_lark
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.grammar import answer_of, grammar_of
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_engine.structured_outputs.long_string_schemas import with_long_strings
from moiety_engine.structured_outputs.preferred_schemas import (
    callable_tools,
    prefer_schema_alone,
    prefer_schemas,
    tools_with_preference,
)
from moiety_engine.structured_outputs.refusals import explain_refusal
from moiety_engine.structured_outputs.state import GrammarState
from moiety_text.folder import read_text_model
from moiety_wire.grammars import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec

_SIZES = ((20_000, 50_000), (80_000, 200_000), (320_000, 800_000))  # states of a lexer, and its fuel for one mask
_SIZE_OF_WALKS = 1
_BYTES_OF_STATE = 2048  # at most, in the lexer of an answer and in the copy that has only read it


def _limits(size: int) -> LLParserLimits:
    num_states, fuel = _SIZES[size]
    return LLParserLimits(
        max_items_in_row=10_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=fuel,
        step_max_items=20_000,
        max_lexer_states=num_states,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def largest_bytes(size: int) -> int:
    """Return the most memory that the lexers of an answer of this size need."""
    return _SIZES[min(size, len(_SIZES) - 1)][0] * _BYTES_OF_STATE


class GrammarCompiler:
    """Compiler of one tokenizer's grammars.

    Thread-safe; compiling releases the interpreter's lock.
    """

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> None:
        """Create the compiler. Raises ValueError where the tokenizer does not support grammars."""
        if not eos_token_ids:
            raise ValueError("the model has no end-of-sequence token")
        tokenizer: Any = GrammarTokenizer(tokenizer_json, eos_token_ids)
        self._walks = AnswerWalks(tokenizer.tokens, tokenizer.special_token_ids)
        self._tokenizer = LLTokenizer(tokenizer, eos_token=list(eos_token_ids))
        self.num_words = -(-self._tokenizer.vocab_size // 32)  # 32-bit words of a mask, one bit per token

    @classmethod
    def read(cls, folder: Path) -> GrammarCompiler:
        """Return the compiler of a checkpoint's tokenizer. Raises ValueError and moiety_text's errors."""
        text = read_text_model(folder)
        return cls(text.tokenizer_json, text.eos_token_ids)

    def open(self, spec: GrammarSpec) -> GrammarState:
        """Compile for one answer. Raises GrammarRefused."""
        return GrammarState(self.compile(spec), partial(self.compile_larger, spec))

    def compile(self, spec: GrammarSpec) -> LLMatcher:
        """Compile a grammar with its supported preferred schemas, and its first mask. Raises GrammarRefused."""
        return self._compile_preferred(spec, self._compile)[0]

    def compile_larger(self, spec: GrammarSpec, size: int) -> LLMatcher | None:
        """Compile an accepted grammar with the limits of a size of the lexer; None if there is no such size."""
        return self._compile(spec, size) if size < len(_SIZES) else None

    def try_grammar(self, spec: GrammarSpec) -> GrammarSpec:
        """Compile a grammar, try it with a long answer, and return it with the preferred schemas that are supported.

        Raises GrammarRefused where the grammar is refused without preferred schemas too.
        """
        return self._compile_preferred(spec, self._try)[1]

    def _compile_preferred(
        self, spec: GrammarSpec, compile_one: Callable[[GrammarSpec], LLMatcher]
    ) -> tuple[LLMatcher, GrammarSpec]:
        preferring = tools_with_preference(spec)
        if not preferring:
            return compile_one(spec), spec
        whole = prefer_schemas(spec, preferring)
        try:
            return compile_one(whole), whole
        except GrammarRefused:
            supported = [i for i in preferring if len(preferring) > 1 and self._supports_alone(spec, i, compile_one)]
        if len(supported) == len(preferring):  # only together do they exceed a limit
            supported = []
        found = prefer_schemas(spec, supported)
        return compile_one(found), found

    @staticmethod
    def _supports_alone(spec: GrammarSpec, index: int, compile_one: Callable[[GrammarSpec], LLMatcher]) -> bool:
        try:
            compile_one(prefer_schema_alone(spec, index))
        except GrammarRefused:
            return False
        return True

    def _try(self, spec: GrammarSpec) -> LLMatcher:
        matcher = self._compile(spec)
        if has_large_counts(spec.text) and (larger := self.compile_larger(spec, _SIZE_OF_WALKS)) is not None:
            self._walks.walk(larger)
            if larger.is_error():
                raise GrammarRefused(too_costly(spec))
        return matcher

    def _compile(self, spec: GrammarSpec, size: int = 0) -> LLMatcher:
        if len(spec.text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"the grammar has more than {MAX_GRAMMAR_BYTES:,} bytes; make it shorter")
        grammar = grammar_of(spec)
        counted = with_long_strings(grammar)
        matcher = self._matcher(counted, size)
        if matcher.is_error() and counted != grammar:
            matcher = self._matcher(grammar, size)  # its errors have the client's places
        if matcher.is_error():
            if (answer := answer_of(spec)) is not None:
                self._compile(answer)  # refuses it by its own text, where that is the reason
            self._check_client_grammars(spec)
            text = as_lark(spec.text) if spec.kind is GrammarKind.GRAMMAR else spec.text
            raise GrammarRefused(explain_refusal(spec.kind, text, matcher.get_error()))
        return matcher

    def _check_client_grammars(self, spec: GrammarSpec) -> None:
        """Raise GrammarRefused for a custom tool's grammar that is refused as the client wrote it too."""
        for tool in callable_tools(spec):
            if not tool.client_definition:
                continue
            kind = GrammarKind.REGEX if tool.client_syntax == "regex" else GrammarKind.GRAMMAR
            try:
                self._compile(GrammarSpec(kind, tool.client_definition))
            except GrammarRefused as exc:
                raise GrammarRefused(f"in the grammar of the tool {tool.name!r}, {exc}") from exc

    def _matcher(self, grammar: str, size: int) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits(size))
        if not matcher.is_error():
            matcher.compute_bitmask()  # now, not in a step: slow grammars show here, and later masks are faster
        return matcher
