"""Grammars of custom tools' inputs, in the calls of a model and with the grammar library of the engine."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress

import msgspec
import pytest
from tests.grammar_walks import GrammarWalker
from tests.tool_call_grammars import FORMATS, format_named

from moiety_demo import checkpoint_path
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_platform.inference.custom_tools import CustomGrammar, custom_tool_of
from moiety_platform.inference.escaped_grammars import MalformedGrammar, NotRewritable, escaped_grammar
from moiety_platform.inference.input_grammars import check_well_formed, input_grammar_of
from moiety_platform.inference.strict_tools import grammar_of_calls, written_input
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import find_tool_format
from moiety_wire.grammars import GrammarKind, GrammarSpec, ReasonedGrammar

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
    ("syntax", "definition", "fault"),
    [
        ("lark", "start: <[5]>", "line 1, at '<[5]>': references to tokens"),
        ("lark", "start: @other", "line 1, at '@other': references to other grammars"),
        ("lark", 'start: %json {"type": "object"}', "line 1, at '%json"),
        ("lark", "%import common.DOUBLE\nstart: DOUBLE", "line 1, the import of common.DOUBLE is not supported"),
        ("lark", 'start: "\\n"i', "line 1, the flag 'i' is not supported here for \"\\n\""),
        ("lark", 'start: "a"\n%ignore " "', "line 2, at '%ignore \" \"': only `%import common.NAME`"),
        ("lark", "start: /a/i", "line 1, the flag 'i' of the expression"),
        ("lark", 'start: "a"\nb: /a(?!b)/', "line 2, at '(?!b)': look-ahead"),
        ("lark", "start: <|special|>", "references to tokens"),
        ("regex", "(?=a)b", "at '(?=a)b': look-ahead"),
        ("regex", "(?i:a)", "this kind of group"),
        ("regex", "a^b", "at '^b': an anchor"),
        ("regex", r"\bx", "the escape sequence is not supported"),
        ("regex", "[a&&b]", "operations of sets"),
        ("regex", "[[:alpha:]]", "nested classes"),
        ("regex", r"\p{L}", "the escape sequence is not supported"),
        ("regex", r"[\N]", "the class cannot be read"),
    ],
)
def test_a_grammar_that_cannot_be_rewritten_exactly_names_its_fault(syntax: str, definition: str, fault: str) -> None:
    with pytest.raises(NotRewritable, match=re.escape(fault)) as caught:
        escaped_grammar(syntax, definition)
    assert not isinstance(caught.value, MalformedGrammar)
    check_well_formed(syntax, definition)


MALFORMED = [
    ("lark", 'start: "open', "line 1, at '\"open': the string is not closed"),
    ("lark", 'start: "a"\nb: /open', "line 2, at '/open': the expression is not closed"),
    ("lark", 'other: "a"', "there is no rule 'start'"),
    ("lark", "", "there is no rule 'start'"),
    ("lark", "start: /a(b/", "line 1, at the end of 'a(b': a group is not closed"),
    ("regex", "[", "at '[': the character class is not closed"),
    ("regex", "a[z-a]", "at '[z-a]': the class cannot be read: bad character range"),
    ("regex", "(a", "at the end of '(a': a group is not closed"),
    ("regex", "a)b", "at ')b': no group is open"),
    ("regex", "*a", "at '*a': there is nothing to repeat"),
    ("regex", "a{", "at '{': the repetition cannot be read"),
    ("regex", "a\\", "at '\\\\': nothing follows the backslash"),
]


@pytest.mark.parametrize(("syntax", "definition", "fault"), MALFORMED)
def test_a_malformed_grammar_is_told_from_one_that_is_not_supported(syntax: str, definition: str, fault: str) -> None:
    with pytest.raises(MalformedGrammar, match=re.escape(fault)):
        check_well_formed(syntax, definition)
    assert fault in input_grammar_of(syntax, definition).faults.escaped


UNDEFINED = [
    ("lark", 'start: "a" missing', "in the grammar of the tool 'write', line 1, column 12"),
    ("lark", 'start: "a" | b\nb: MISSING', "no rule or terminal has the name 'MISSING'"),
    ("lark", 'start: "a" |* "b"', "line 1, column 13"),
    ("regex", "a**", "in the grammar of the tool 'write', "),
]


@pytest.mark.parametrize(("syntax", "definition", "fault"), UNDEFINED)
def test_the_compiler_names_a_fault_by_its_place_in_the_clients_grammar(
    syntax: str, definition: str, fault: str
) -> None:
    check_well_formed(syntax, definition)
    tools = (
        custom_tool_of("fine", None, CustomGrammar("regex", "a+")),
        custom_tool_of("write", None, CustomGrammar(syntax, definition)),
    )
    for grammar in (calls_of(*tools), reasoned(calls_of(*tools))):
        with pytest.raises(GrammarRefused) as caught:
            COMPILER.compile(grammar)
        assert fault in str(caught.value)
        assert "terminal_" not in str(caught.value) and "input_1" not in str(caught.value)


def reasoned(answer: GrammarSpec) -> GrammarSpec:
    form = ReasonedGrammar(answer, "<think>", "</think>", is_open=False, special={})
    return GrammarSpec(GrammarKind.REASONED, json.dumps(msgspec.to_builtins(form)))


# In the constructs of the grammars that agents send: patches of Codex, its code mode, its scripts, OpenAI's examples.
KNOWN = [
    (
        "lark",
        'start: begin where? hunk+ end\nbegin: "*** Begin" LF\nwhere: "*** At: " name LF\nend: "*** End" LF?\n\n'
        'hunk: add | drop | change\nadd: "*** Add: " name LF line+\ndrop: "*** Drop: " name LF\n'
        'change: "*** Change: " name LF move? lines?\nname: /(.+)/\nline: "+" /(.*)/ LF -> line\n'
        'move: "*** To: " name LF\nlines: (context | changed)+ last?\ncontext: ("@@" | "@@ " /(.+)/) LF\n'
        'changed: ("+" | "-" | " ") /(.*)/ LF\nlast: "*** Last" LF\n\n%import common.LF\n',
        ['*** Begin\n*** Change: a "b"\n@@ f\n-x\n+\n*** End', "*** Begin\n*** At: c\n*** Add: d\n+\\\n*** End\n"],
        ["*** Begin\n*** End", "*** Begin\n*** Add: d\nx\n*** End"],
    ),
    (
        "lark",
        "\nstart: marked | plain\nmarked: MARK NEWLINE SOURCE\nplain: SOURCE\n\nMARK: /[ \\t]*\\/\\/ @run:[^\\r\\n]*/\n"
        "NEWLINE: /\\r?\\n/\nSOURCE: /[\\s\\S]+/\n",
        ['// @run: {"a": 1}\nlet b = "c";', "x\n"],
        [""],
    ),
    (
        "lark",
        'start: PLAIN\nPLAIN: /(?:\\s*)(?:[^\\s{\\"`]|`[^`]|``[^`])[\\s\\S]*/',
        ['let a = "{";\n', " `a`"],
        ['{"a": 1}', '"a"'],
    ),
    (
        "lark",
        'start: sum\nsum: part (SP ADD SP part)* -> add\npart: INT\nSP: " "\nADD: "+"\n%import common.INT\n',
        ["1 + 23"],
        ["1+2", "a"],
    ),
    (
        "regex",
        r"^(?P<month>May|June)\s+(?P<day>\d{1,2})(?:st|nd|rd|th)? at (?<hour>0?[1-9]|1[0-2])(?P<half>AM|PM)$",
        ["May 3rd at 07PM"],
        ["July 3 at 7PM"],
    ),
]


@pytest.mark.parametrize(("syntax", "definition", "good", "bad"), KNOWN)
@pytest.mark.parametrize("name", FORMATS)
def test_grammars_of_known_clients_are_held_in_every_format(
    name: str, syntax: str, definition: str, good: list[str], bad: list[str]
) -> None:
    tool = custom_tool_of("write", None, CustomGrammar(syntax, definition))
    way = format_named(name)
    assert tool.input_grammar is not None and written_input(tool, way, {}).grammar
    if way.parameters is None:
        grammar = calls_of(tool)
        for text in (*good, *bad):
            assert is_followed(grammar, called(text)) is (text in good), text


def test_rewriting_takes_linear_time_and_is_bounded() -> None:
    assert escaped_grammar("regex", r"a\\$") == escaped_grammar("regex", r"a\\") != ""
    assert escaped_grammar("regex", r"a\$") not in ("", escaped_grammar("regex", "a"))
    for text, fault in (
        ("[ab]" * 129, "128 character classes"),
        ("." * 1000, "131,072 bytes"),
        ("a" * 20_000, "16,384"),
    ):
        with pytest.raises(NotRewritable, match=fault):
            escaped_grammar("regex", text)
    for text in (
        "/" + "[" * 15_000,
        '"' * 15_000,
        "(" * 15_000,
        "\\" * 15_001,
        '"a"' + " " * 15_000 + ".",
        "[]" * 7_500,
    ):
        for syntax in ("lark", "regex"):
            with suppress(NotRewritable):  # the test's time limit is the check
                escaped_grammar(syntax, text)
