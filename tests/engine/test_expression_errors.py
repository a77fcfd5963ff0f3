"""An error in an expression or a grammar is reported with its position and with advice."""

from __future__ import annotations

import pytest

from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.expression_errors import MAX_MESSAGE_CHARS, excerpt
from moiety_wire.grammars import GrammarKind, GrammarSpec

TEXT = scripted_text_model()
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)


def refusal(kind: GrammarKind, text: str) -> str:
    with pytest.raises(GrammarRefused) as refused:
        COMPILER.compile(GrammarSpec(kind, text))
    return str(refused.value)


@pytest.mark.parametrize(
    ("expression", "character", "where", "told"),
    [
        ("(a", 1, "⟶(a", "the group is not closed; add ')'"),
        ("né(", 3, "né⟶(", "the group is not closed"),
        ("a)b", 2, "a⟶)b", "no group is open"),
        ("[a", 1, "⟶[a", "the character class is not closed; add ']'"),
        (r"a\q", 2, r"a⟶\q", "the escape sequence is not known"),
        ("a\\", 2, "a⟶\\", "a backslash escapes nothing"),
        (r"a(?<=b)c", 2, "a⟶(?<=b)c", "look-ahead and look-behind are not supported"),
        ("(?=a)b", 1, "⟶(?=a)b", "look-ahead and look-behind are not supported"),
        (r"(a)\1", 4, r"(a)⟶\1", "back-references are not supported"),
        ("a{4294967296}", 2, "a⟶{4294967296}", "the repetition's count is too large"),
        ("a{3,1}", 2, "a⟶{3,1}", "the repetition's minimum is above its maximum"),
        ("a{,3}", 2, "a⟶{,3}", "write {0,n}"),
        ("*a", 1, "⟶*a", "there is nothing to repeat"),
        ("[z-a]", 2, "[⟶z-a]", "the range begins after its end"),
        (r"\p{Foo}", 1, r"⟶\p{Foo}", "the Unicode property is not known"),
        (r"[b$]a\b", 6, r"[b$]a⟶\b", "word boundaries are not supported"),
        ("^a$b$", 3, "^a⟶$b$", "an anchor is not allowed here; leave it out"),
        ("a^", 2, "a⟶^", "an anchor is not allowed here"),
        ("a/b\n(", 5, "⟶(", "the group is not closed"),
    ],
)
def test_a_fault_of_an_expression_has_its_place_and_its_remedy(
    expression: str, character: int, where: str, told: str
) -> None:
    found = refusal(GrammarKind.REGEX, expression)
    assert found.startswith(f"at character {character} ({where}): ")
    assert told in found


@pytest.mark.parametrize(
    ("grammar", "line", "column", "told"),
    [
        ('start: a b\na: "x"', 1, 10, "no rule or terminal has the name 'b'; define it"),
        ('start: "é" A\nA: /x/ BB', 2, 8, "no rule or terminal has the name 'BB'"),
        ('start:\n  | "b"\n  | b', 3, 5, "no rule or terminal has the name 'b'"),
        ('start: "a', 1, 8, "the string is not closed on its line; add '\"'"),
        ('// "\nstart: a\na: "x" "y', 3, 8, "the string is not closed on its line"),
        (r'start: "a\q"', 1, 10, r"the escape sequence \q is not known in a string"),
        ("start: 'a'", 1, 8, 'strings need double quotes; write "a"'),
        ("start: /a", 1, 8, "the expression is not closed on its line"),
        ("start: é", 1, 8, "'é' is not allowed here; put text between double quotes"),
        ('start: ("a"', 1, 12, "Expected token ')', found the end of the line"),
        ('start: a)\na: "x"', 1, 9, "expecting rule, token or statement"),
        ('start "a"', 1, 7, "Expected token ':'"),
        ('start: aB\naB: "x"', 2, 2, "rule names are lowercase, terminal names uppercase"),
        ('start: "a"{3,1}', 1, 8, "range end must be >= start"),
        ('start: "a"\nstart: "b"', 2, 8, "duplicate rule"),
        ('start: a\na: %json {"type": }', 2, 19, "the text after %json is not JSON"),
    ],
)
def test_a_fault_of_a_grammar_has_its_line_and_column(grammar: str, line: int, column: int, told: str) -> None:
    found = refusal(GrammarKind.GRAMMAR, grammar)
    assert found.startswith(f"line {line}, column {column} (")
    assert told in found


@pytest.mark.parametrize(
    ("grammar", "place", "told"),
    [
        ('start: /a/ "b" /c(/', "line 1, column 16, at character 2 of the expression (c⟶(): ", "add ')'"),
        ("start: A\nA: /x(?<=y)/", "line 2, column 4, at character 2 of the expression (x⟶(?<=y)): ", "look-behind"),
        (r"start: /é\/(a)\1/", r"line 1, column 8, at character 7 of the expression (é\/(a)⟶\1): ", "back-references"),
    ],
)
def test_a_fault_of_an_expression_in_a_grammar_has_both_places(grammar: str, place: str, told: str) -> None:
    found = refusal(GrammarKind.GRAMMAR, grammar)
    assert found.startswith(place)
    assert told in found


def test_a_grammar_without_a_beginning_says_so() -> None:
    assert "there is no rule 'start'" in refusal(GrammarKind.GRAMMAR, 'a: "x"')


def test_an_excerpt_is_short_and_of_one_line() -> None:
    assert excerpt("a\n" + "b" * 100 + "(" + "c" * 100 + "\nd", 102) == f"…{'b' * 24}⟶({'c' * 23}…"
    assert len(refusal(GrammarKind.GRAMMAR, "%import common.FOO\nstart: FOO")) <= MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("expression", "lets", "stops"),
    [
        (r"\w", ["a", "ü", "٣"], ["\u0301", "\u203f", "½"]),
        (r"[^\W]", ["a", "ü"], ["\u0301", "-"]),
        (r"\S", ["a"], ["\x1c", "\x85"]),
        (r"\s", [" ", "\x85", "\u2028"], ["\x1c", "\ufeff"]),
        (".", ["\r", "\u2028"], ["\n"]),
        ("(?s).", ["\n"], []),
        ("(?i)k", ["k", "K"], ["a"]),
        ("[]a]", ["]", "a"], ["b"]),
        (r"[\b]", ["\b"], ["b"]),
        (r"\x{41}\u0042", ["AB"], ["A"]),
        ("a/b#c d", ["a/b#c d"], ["a"]),
    ],
)
def test_an_answer_matches_its_expression_in_python_and_in_rust(
    expression: str, lets: list[str], stops: list[str]
) -> None:
    matcher = COMPILER.compile(GrammarSpec(GrammarKind.REGEX, expression))
    for texts, is_let in ((lets, True), (stops, False)):
        for text in texts:
            tokens = [*text.encode(), *TEXT.eos_token_ids]
            assert (matcher.validate_tokens(tokens) == len(tokens)) is is_let, text


@pytest.mark.parametrize(
    "expression", ["[a&&b]", "[a--b]", "[a~~b]", "[[:alpha:]]", r"\Aa", "a++", "(?x)a b", "(?m)^a"]
)
def test_an_expression_that_dialects_read_differently_is_refused(expression: str) -> None:
    assert refusal(GrammarKind.REGEX, expression).startswith("at character ")
