"""Conversion of a grammar spec to the grammar that llguidance compiles.

Schema parts that llguidance would ignore are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import msgspec
from llguidance import LLMatcher

from moiety_engine.structured_outputs.calls import (
    answer_beside_calls,
    calls_grammar,
    input_grammars,
    input_grammars_of,
)
from moiety_engine.structured_outputs.ebnf import as_lark
from moiety_engine.structured_outputs.embedded_schemas import with_exact_embedded_schemas
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import exact_schema_of
from moiety_engine.structured_outputs.harmony import harmony_of, harmony_rules
from moiety_engine.structured_outputs.large_repetitions import check_repetitions, counting_rules
from moiety_engine.structured_outputs.patterns import exact_expression
from moiety_engine.structured_outputs.reasoned import ANSWER, reasoned_of, reasoned_rules, with_grammars
from moiety_wire.grammars import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TERMINAL_CHARS = 50_000  # of a terminal with its referenced terminals expanded
MAX_CHOICES = 4096

# At most one space between the parts of a document, so that no document consists of white space.
_WHITESPACE = r"\x20"
_RULE = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]]*\])?\s*:", re.MULTILINE)
_NAME = re.compile(r"(?<![\w\\])[A-Z_][A-Z0-9_]*(?!\w)")
_REPEATED = re.compile(r"\s*(?:\{\s*(?:\d+\s*,\s*)?(\d{1,9})\s*\}|~\s*(?:\d+\s*\.\.\s*)?(\d{1,9}))")
_COMMENT = re.compile(r"//[^\n]*")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')


def grammar_of(spec: GrammarSpec) -> str:
    """Return the grammar for llguidance. Raises GrammarRefused."""
    others: dict[str, str] = {}
    match spec.kind:
        case GrammarKind.REASONED:
            rules = reasoned_rules(reasoned_of(spec))
        case GrammarKind.HARMONY:
            form = harmony_of(spec)
            rules, others = harmony_rules(form), _checked_inputs(input_grammars_of(form.tools))
        case _:
            return _answer_grammar(spec)
    answer = answer_of(spec)
    if answer is not None:
        others = {ANSWER.removeprefix("@"): _answer_grammar(answer), **others}
    return with_grammars(rules, others) if others else LLMatcher.grammar_from_lark(rules)


def answer_of(spec: GrammarSpec) -> GrammarSpec | None:
    """Return the grammar of the answer after reasoning, for a grammar that includes reasoning."""
    if spec.kind is GrammarKind.REASONED:
        return reasoned_of(spec).answer
    return harmony_of(spec).answer if spec.kind is GrammarKind.HARMONY else None


def _answer_grammar(spec: GrammarSpec) -> str:
    """Return the grammar of an output, or of its part after the reasoning. Raises GrammarRefused."""
    match spec.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_grammar('{"type":"object"}')
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(spec.text)
        case GrammarKind.REGEX:
            return _regex_grammar(spec.text)
        case GrammarKind.CHOICE:
            return _choice_grammar(spec.text)
        case GrammarKind.GRAMMAR:
            return _lark_grammar(spec.text)
        case GrammarKind.CALLS:
            return _calls_grammar(spec.text)
        case _:
            raise GrammarRefused("the grammar after the reasoning must not begin with reasoning again")


def _regex_grammar(text: str) -> str:
    expression = exact_expression(text)
    if (rules := counting_rules(expression)) is not None:
        return LLMatcher.grammar_from_lark(rules)
    check_repetitions(expression, text)
    return LLMatcher.grammar_from_regex(expression)


def _json_grammar(text: str) -> str:
    try:
        exact = exact_schema_of(text)
        options = cast("JsonCompileOptions", exact.options(whitespace_pattern=_WHITESPACE))
        return LLMatcher.grammar_from_json_schema(exact.encode(), overrides=options)
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"it is not a valid JSON schema: {exc}") from exc


def _choice_grammar(text: str) -> str:
    try:
        choices = msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as exc:
        raise GrammarRefused("the choices must be a list of strings") from exc
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise GrammarRefused(f"there must be 1 to {MAX_CHOICES:,} choices, none of them empty")
    quoted = " | ".join(msgspec.json.encode(choice).decode() for choice in dict.fromkeys(choices))
    return LLMatcher.grammar_from_lark(f"start: {quoted}")


def _calls_grammar(text: str) -> str:
    """Return the grammar of tool calls, with those of the inputs of custom tools and of answers without calls."""
    calls, others, answer = calls_grammar(text), _checked_inputs(input_grammars(text)), answer_beside_calls(text)
    if answer is not None:
        others = {**others, "answer": grammar_of(answer)}
    return with_grammars(calls, others, "calls") if others else LLMatcher.grammar_from_lark(calls)


def _checked_inputs(inputs: dict[str, str]) -> dict[str, str]:
    for one in inputs.values():
        check_terminals(one)
    return inputs


def _lark_grammar(text: str) -> str:
    text = as_lark(text)
    check_terminals(text)
    try:
        return LLMatcher.grammar_from_lark(with_exact_embedded_schemas(text))
    except RecursionError as exc:
        raise GrammarRefused("a schema within the grammar is nested too deeply") from exc


def check_terminals(lark: str) -> None:
    """Refuse terminals that expand to too many characters.

    A terminal is compiled as one expression with its referenced terminals expanded: a few lines can expand beyond any
    memory. So does the lexer for one with large counts within it. Raises GrammarRefused.
    """
    lark = _without_comments(lark)
    for quoted in _QUOTED.finditer(lark):
        if quoted[0].startswith("/"):
            check_repetitions(quoted[0][1:-1], quoted[0])
    bodies = _terminals(lark)
    for body in bodies.values():  # within a rule, the parser counts
        for quoted in _QUOTED.finditer(body):
            if quoted[0].startswith("/") and (count := _REPEATED.match(body, quoted.end())) is not None:
                check_repetitions(f"(?:{quoted[0][1:-1]}){{{count[1] or count[2]}}}", quoted[0] + count[0])
    lengths: dict[str, int] = {}
    for name in bodies:
        if _length(name, bodies, lengths, set()) > MAX_TERMINAL_CHARS:
            raise GrammarRefused(
                f"the terminal {name[:64]} has more than {MAX_TERMINAL_CHARS:,} characters with its "
                "referenced terminals expanded; make some of them rules (lowercase names)"
            )


def _without_comments(lark: str) -> str:
    """Return a grammar without its comments. `//` within a string or an expression begins none."""
    kept, at = [], 0
    while at < len(lark):
        if (comment := _COMMENT.match(lark, at)) is not None:
            at = comment.end()
            continue
        quoted = _QUOTED.match(lark, at)
        end = quoted.end() if quoted is not None else at + 1
        kept.append(lark[at:end])
        at = end
    return "".join(kept)


def _terminals(lark: str) -> Mapping[str, str]:
    """Return the text of every terminal by its name."""
    rules = list(_RULE.finditer(lark))
    ends = [*(rule.start() for rule in rules[1:]), len(lark)]
    return {rule[1]: lark[rule.end() : end] for rule, end in zip(rules, ends, strict=False) if rule[1].isupper()}


def _length(name: str, bodies: Mapping[str, str], lengths: dict[str, int], within: set[str]) -> int:
    """Return the characters of an expanded terminal; a repetition counts as often as it repeats.

    A terminal that refers to itself is left for the library to refuse.
    """
    if name in lengths or name in within or name not in bodies:
        return lengths.get(name, 0)
    if len(within) >= 100:
        raise GrammarRefused("terminals are nested more than 100 deep")
    within.add(name)
    body = _QUOTED.sub(lambda quoted: "." * len(quoted[0]), bodies[name])
    total = len(body) + sum(_length(one[0], bodies, lengths, within) for one in _NAME.finditer(body))
    within.discard(name)
    most = [int(times) for times in re.findall(r"(?:~\s*|\.\.\s*|,\s*|\{\s*)(\d{1,9})", body)]
    for times in most:
        total *= max(1, times)
    lengths[name] = min(total, 10 * MAX_TERMINAL_CHARS)
    return lengths[name]
