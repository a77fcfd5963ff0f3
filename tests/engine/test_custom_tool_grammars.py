"""Grammars of custom tools' inputs, in the calls of a model and with the grammar library of the engine."""

from __future__ import annotations

import json
import random
import re

import pytest
from tests.grammar_walks import GrammarWalker

from moiety_demo import checkpoint_path
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_platform.inference.custom_tools import CustomGrammar, custom_tool_of
from moiety_platform.inference.escaped_grammars import escaped_grammar
from moiety_platform.inference.strict_tools import grammar_of_calls
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import find_tool_format
from moiety_wire.grammars import GrammarKind, GrammarSpec

TEXT = read_text_model(checkpoint_path())
TOKENIZER = Tokenizer.from_json(TEXT.tokenizer_json)
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)
WALKER = GrammarWalker(COMPILER, GrammarTokenizer(TEXT.tokenizer_json, TEXT.eos_token_ids).tokens, TEXT.eos_token_ids)
TEMPLATE = "{{ tools }}<tool_call>\n{{ message.tool_calls }}"

PATCH = """
start: "*** Begin" LF change+ "*** End" LF?   // as in a patch
change: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""
QUOTED = 'start: PAIR ("," PAIR)*\nPAIR: /[a-c"\\\\]+/ "=" "\\"" /[^"]*/ "\\""'
LARK = [
    (PATCH, ['*** Begin\n+a "b" \\n\n- \u00e9\U0001f600\t\n*** End', "*** Begin\n \n*** End\n"],
     ["*** Begin\n*** End", "*** Begin\n*a\n*** End", "*** Begin +a\n*** End"]),
    (QUOTED, ['a"b\\="x\ny",c=""', 'b=""'], ['d=""', 'a="', 'a="""']),
    ('%import common.WS\nstart: "a".."c" WS /[\\s\\S]/s', ["b \t\n", 'c\n\x00', 'a "'], ["d \n", "b", "bx"]),
    ('start: "yes"i | /n./', ["YES", "nx", 'n"'], ["no\n", "n\n"]),
]  # fmt: skip
REGEX = [
    (r'^\d{3}-"?[^a]\n\/x$', ['123-"b\n/x', "123-\\\n/x"], ["123-a\n/x", "12-b\n/x", "123-b/x"]),
    (r"(?:ab|\x0a|\.)+\s?", ["ab\n.", "ab\t"], ["ab,", "a"]),
]  # fmt: skip


def calls_of(*tools: Tool) -> GrammarSpec:
    way = find_tool_format(TEMPLATE)
    assert way is not None
    grammar = grammar_of_calls(way, ToolOffer(tools), {})
    assert grammar is not None
    return grammar


def is_followed(grammar: GrammarSpec, text: str) -> bool:
    matcher = COMPILER.compile(grammar)
    taken = matcher.consume_tokens(TOKENIZER.encode(text, add_special_tokens=False))
    return bool(taken and matcher.is_accepting())


def called(text: str) -> str:
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return f'Well.<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"),
    [*(("lark", *one) for one in LARK), *(("regex", *one) for one in REGEX)],
)
def test_a_call_has_an_input_of_the_grammar(syntax: str, definition: str, good: list[str], bad: list[str]) -> None:
    tool = custom_tool_of("write", None, CustomGrammar(syntax, definition))
    assert tool.input_grammar
    grammar = calls_of(tool, Tool("other", "", {"type": "object"}))
    for text in good:
        assert is_followed(grammar, called(text)), text
    for text in bad:
        assert not is_followed(grammar, called(text)), text
    assert not is_followed(grammar, called("").replace('"input"', '"other"'))
    assert is_followed(grammar, "No call.")
    assert is_followed(grammar, called("").replace("write", "other"))


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT])
def test_an_answer_with_a_response_format_is_calls_or_a_document(kind: GrammarKind) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = GrammarSpec(kind, json.dumps(schema) if kind is GrammarKind.JSON_SCHEMA else "")
    way = find_tool_format(TEMPLATE)
    assert way is not None
    tools = custom_tool_of("write", None, CustomGrammar("regex", "a+")), Tool("other", "", {"type": "object"})
    grammar = grammar_of_calls(way, ToolOffer(tools), {}, (), answer)
    assert grammar is not None
    call = called("aa").removeprefix("Well.")
    assert is_followed(grammar, call) and is_followed(grammar, call + call)
    assert is_followed(grammar, '{"a": 5}')
    for text in ("Well.", "Well." + call, call + '{"a": 5}', '{"a": 5}' + call, called("b").removeprefix("Well.")):
        assert not is_followed(grammar, text), text
    assert is_followed(grammar, '{"b": 5}') is (kind is GrammarKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (GrammarSpec(GrammarKind.REGEX, "[ab]{2}"), "ab", "abc"),
        (GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]'), "no", "noo"),
        (GrammarSpec(GrammarKind.GRAMMAR, 'start: "x" %json {"type": "integer"}'), "x5", "x"),
    ],
)
def test_an_answer_with_another_constraint_is_calls_or_follows_it(answer: GrammarSpec, good: str, bad: str) -> None:
    way = find_tool_format(TEMPLATE)
    assert way is not None
    grammar = grammar_of_calls(way, ToolOffer((Tool("write", "", {"type": "object"}),)), {}, (), answer)
    assert is_followed(grammar, called("aa").removeprefix("Well.")) and is_followed(grammar, good)
    assert not is_followed(grammar, bad) and not is_followed(grammar, good + called("aa"))


def test_random_calls_are_inputs_of_the_grammar() -> None:
    expression = r'[a-c"\\\n\t\x01]{2,5}-[^x\n]?'
    grammar = calls_of(custom_tool_of("write", None, CustomGrammar("regex", expression)))
    draw, num_ended = random.Random(7), 0
    begun = TOKENIZER.encode('<tool_call>\n{"name": "write", "arguments": {', add_special_tokens=False)
    for _ in range(40):
        answer = WALKER.draw_answer(grammar, draw, begun, hurry_after=8)
        if answer is None:
            continue
        text = TOKENIZER.decode(answer, skip_special_tokens=False)
        made, _, _ = text.partition("\n</tool_call>")
        arguments = json.loads(made.removeprefix("<tool_call>\n"))["arguments"]
        assert list(arguments) == ["input"] and re.fullmatch(expression, arguments["input"])
        num_ended += 1
    assert num_ended > 20


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", "start: <[5]>"), ("lark", "start: @other"), ("lark", 'start: %json {"type": "object"}'),
        ("lark", "%import common.ESCAPED_STRING\nstart: ESCAPED_STRING"), ("lark", 'start: "\\n"i'),
        ("lark", 'start: "a"\n%ignore " "'),
        ("lark", "start: /a/i"), ("lark", 'start: "open'), ("lark", "start: <|special|>"), ("regex", "(?=a)b"),
        ("regex", "(?i:a)"), ("regex", "a^b"), ("regex", r"\bx"), ("regex", "[a&&b]"), ("regex", "[[:alpha:]]"),
        ("regex", r"\p{L}"), ("regex", "["), ("regex", "[z-a]"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_rewritten_exactly_is_not_used(syntax: str, definition: str) -> None:
    assert escaped_grammar(syntax, definition) == ""


def test_rewriting_takes_linear_time_and_is_bounded() -> None:
    assert escaped_grammar("regex", r"a\\$") == escaped_grammar("regex", r"a\\") != ""
    assert escaped_grammar("regex", r"a\$") not in ("", escaped_grammar("regex", "a"))
    assert escaped_grammar("regex", "[ab]" * 129) == ""
    assert escaped_grammar("regex", "." * 1000) == escaped_grammar("regex", "a" * 20_000) == ""
    for text in (
        "/" + "[" * 15_000,
        '"' * 15_000,
        "(" * 15_000,
        "\\" * 15_001,
        '"a"' + " " * 15_000 + ".",
        "[]" * 7_500,
    ):
        for syntax in ("lark", "regex"):
            escaped_grammar(syntax, text)  # the test's time limit is the check
