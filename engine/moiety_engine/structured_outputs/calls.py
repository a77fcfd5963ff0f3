"""Grammar of answers that may call tools: free text, and calls whose arguments match their schemas."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import msgspec

from moiety_engine.structured_outputs.argument_rules import ArgumentRules
from moiety_engine.structured_outputs.element_arguments import ElementArguments
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import ExactSchema, exact_schema_of
from moiety_engine.structured_outputs.keyword_arguments import KeywordArguments
from moiety_engine.structured_outputs.lark_text import lark_string, quoted_with_tokens, split_at_token
from moiety_engine.structured_outputs.member_arguments import MemberArguments
from moiety_engine.structured_outputs.tagged_arguments import TaggedArguments
from moiety_wire.grammars import (
    ArgumentNotation,
    GrammarSpec,
    ParameterTagsGrammar,
    ToolCallGrammar,
    ToolCallsGrammar,
)

FIRST_TOOL_LINE = 3  # of a grammar of calls, with one line per tool's arguments
_ONE_SPACE = r"\x20"
_JSON_LEXEME = re.compile(r'"[^"]*"| |[^" ]')


def calls_grammar(text: str) -> str:
    """Return the grammar in Lark's syntax. Raises GrammarRefused."""
    try:
        form = msgspec.json.decode(text, type=ToolCallsGrammar)
        arguments = _argument_rules(form)
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"the grammar of the tool calls cannot be decoded: {exc}") from exc

    def quoted(text: str) -> str:
        return quoted_with_tokens(text, form.special)

    rules = ["%llguidance {}", f"start: {_start(form)}", *arguments]
    if form.answer is not None and not form.opener and form.parameters is None:
        return "\n".join([*rules, *_called_in_json(form)])
    name_end = f"/{form.name_end}/ " if form.name_end else ""
    between = quoted(form.between)
    if form.call_id is not None:
        between = f"{quoted(form.call_id.opener)} /{form.call_id.pattern}/ {between}"
    inner = [f"{quoted(tool.name)} {name_end}{between} {_with_arguments(form, i)}" for i, tool in enumerate(form.tools)]
    rest = " | ".join(inner)
    if form.is_named:
        rest = _with_arguments(form, 0) if form.call_id is None else f"{between} {_with_arguments(form, 0)}"
    rules += [f"rest: ({rest}) {quoted(form.after)} more", f"inner: {' | '.join(inner)}"]
    again = ""
    if form.separator is not None and form.may_repeat:
        again = f"({quoted(form.separator)} inner {quoted(form.after)})*"
    rules += [f"more: {again} {quoted(form.closer)}", f"calls: {quoted(form.before)} inner {quoted(form.after)} more"]
    rules += ["ANY: /(.|\\n)*/", "TEXT: /(.|\\n)+/"]
    if form.answer is not None and not form.must_call:
        return "\n".join([*rules, f"called: {quoted(form.opener)} calls"])
    return "\n".join([*rules, *_free_text(form.free_ids, "{" if form.opener else form.before[:1]), *_text_around(form)])


def schema_at(form: ToolCallsGrammar, line: int) -> tuple[str, str]:
    """Return the place of the schema in a line of the grammar, as words, and the schema as text."""
    number = line - FIRST_TOOL_LINE
    found = _new_rules(form)
    if found is None:
        tool = form.tools[number]
        return f"in the parameters of the tool {tool.name!r}", tool.schema
    for index, tool in enumerate(form.tools):
        found.add_tool(index, tool)
    return found.place_of(number - len(form.tools))


def _new_rules(form: ToolCallsGrammar) -> ArgumentRules | None:
    """Return the rules of arguments that are not a JSON object; None where they are."""
    found = form.parameters
    if found is None:
        return None
    if isinstance(found, ParameterTagsGrammar):
        return TaggedArguments(found, form.special)
    match found.notation:
        case ArgumentNotation.KEYWORDS:
            return KeywordArguments(form.special)
        case ArgumentNotation.MEMBERS:
            return MemberArguments(found.mark, form.special)
    return ElementArguments(found.mark, form.special)


def _argument_rules(form: ToolCallsGrammar) -> list[str]:
    found = _new_rules(form)
    if found is None:
        return [f"arguments_{number}: {json_arguments(tool, number)}" for number, tool in enumerate(form.tools)]
    arguments = [found.add_tool(index, tool) for index, tool in enumerate(form.tools)]
    values = [f"json_{i}: {json_rule(schema)}" for i, schema in enumerate(found.json_schemas)]
    return [*arguments, *values, *found.value_rules()]


def json_rule(exact: ExactSchema) -> str:
    """Return the rule of JSON documents of a schema, with at most one space between their parts."""
    return f"%json {exact.encode(**exact.options(whitespace_pattern=_ONE_SPACE))}"


def _called_in_json(form: ToolCallsGrammar) -> list[str]:
    """Return the rules of calls in the lexemes of JSON.

    The lexer takes the longest lexeme, so a beginning that an answer in JSON shares must have the answer's lexemes.
    """

    def calls_after(text: str) -> str:
        beginnings = [_json_lexemes(text + tool.name + form.between) for tool in form.tools]
        return " | ".join(f'{one} " "? arguments_{i}' for i, one in enumerate(beginnings))

    after, again = _json_lexemes(form.after), ""
    rules = [f"first: {calls_after(form.before)}"]
    if form.separator is not None and form.may_repeat:
        rules.append(f"next: {calls_after(form.separator)}")
        again = f"(next {after})*"
    return [*rules, f"called: first {after} {again} {_json_lexemes(form.closer)}"]


def _json_lexemes(text: str) -> str:
    """Return text in grammar syntax, in parts that are strings, punctuation or optional white space of JSON."""
    return " ".join('" "?' if part == " " else lark_string(part) for part in _JSON_LEXEME.findall(text))


def _free_text(free_ids: Sequence[int], first: str) -> list[str]:
    """Return the rules of `text`, which may be empty, and of `plain`, which does not begin with `first` like a call.

    A grammar does not count added tokens as text, so those that free text may contain are named.
    """
    rules = [f"FIRST: /[^{re.escape(first)}\\s](.|\\n)*/"]
    if not free_ids:
        return [*rules, "text: TEXT?", "plain: FIRST"]
    return [
        *rules,
        f"other: <[{','.join(id_ranges(free_ids))}]>",
        "text: TEXT? (other TEXT?)*",
        "plain: (FIRST | other TEXT?) (other TEXT?)*",
    ]


def _text_around(form: ToolCallsGrammar) -> list[str]:
    """Return the rules of calls with the text and the marker before them, and of the text after the last call.

    `again` and `tail_after` follow a call. They do not begin with a bracket: a call with one left over is no call.
    """
    if not form.opener:
        return ["tail: plain"]
    opener = quoted_with_tokens(form.opener, form.special)
    head = split_at_token(form.opener, form.special)
    rules = ["AFTER: /[ \\t\\r\\n]+|[ \\t\\r\\n]*[^ \\t\\r\\n\\]}](.|\\n)*/"]
    rules.append("text_after: AFTER? (other TEXT?)*" if form.free_ids else "text_after: AFTER?")
    if head is None:
        rules += [
            "tail: text",
            "tail_after: text_after",
            f"mark[lazy]: ANY {opener}",
            f"mark_after[lazy]: AFTER? {opener}",
        ]
        others = "(TEXT? other)* " if form.free_ids else ""
        after_others = f" | AFTER? other {others}mark calls" if form.free_ids else ""
        return [*rules, f"opened: {others}mark calls", f"again: mark_after calls{after_others}"]
    if not head:
        opened = [f"opened: text {opener} calls", f"again: text_after {opener} calls"]
        return [*rules, "tail: text", "tail_after: text_after", *opened]
    # a token within the marker: the characters before it are text wherever the token does not follow them
    rest = quoted_with_tokens(form.opener[len(head) :], form.special)
    return [
        *rules,
        f"head[lazy]: ANY {lark_string(head)}",
        f"head_after[lazy]: AFTER? {lark_string(head)}",
        f"piece: {'head | TEXT? other' if form.free_ids else 'head'}",
        f"piece_after: {'head_after | AFTER? other' if form.free_ids else 'head_after'}",
        "tail: piece* TEXT?",
        "tail_after: AFTER? | piece_after piece* TEXT?",
        f"opened: piece* head {rest} calls",
        f"again: (head_after | piece_after piece* head) {rest} calls",
    ]


def id_ranges(token_ids: Sequence[int]) -> Iterator[str]:
    """Yield ascending token ids in grammar syntax, consecutive ones as a range."""
    for _, row in itertools.groupby(enumerate(sorted(set(token_ids))), lambda one: one[1] - one[0]):
        found = [token_id for _, token_id in row]
        yield f"{found[0]}-{found[-1]}"


def _start(form: ToolCallsGrammar) -> str:
    repeats = form.opener and form.may_repeat
    if form.must_call:
        return "rest again* tail_after" if repeats else "rest"
    if form.answer is not None:
        return "called+ | @answer" if repeats else "called | @answer"
    if not form.opener:
        return "calls | tail"
    return "opened again* tail_after | tail" if repeats else "opened | tail"


def _with_arguments(form: ToolCallsGrammar, number: int) -> str:
    return f'" "? arguments_{number}' if form.parameters is None else f"arguments_{number}"


def answer_beside_calls(text: str) -> GrammarSpec | None:
    """Return the grammar of an answer without calls, which `calls_grammar` refers to as `answer`."""
    return msgspec.json.decode(text, type=ToolCallsGrammar).answer


def input_grammars(text: str) -> dict[str, str]:
    """Return the grammars of tools' inputs by the names that `calls_grammar` refers to them by."""
    form = msgspec.json.decode(text, type=ToolCallsGrammar)
    found = _new_rules(form)
    return input_grammars_of(form.tools, found)


def input_grammars_of(tools: Sequence[ToolCallGrammar], rules: ArgumentRules | None = None) -> dict[str, str]:
    """Return the grammars of tools' inputs by the names that `json_arguments` and the rules refer to them by."""
    return {
        f"input_{number}": tool.input_grammar if rules is None else rules.input_grammar(tool)
        for number, tool in enumerate(tools)
        if tool.input_grammar
    }


def json_arguments(tool: ToolCallGrammar, number: int) -> str:
    """Return the rule of a tool's arguments that are a JSON object. Raises GrammarRefused."""
    if not tool.input_grammar:
        return json_rule(exact_schema_of(tool.schema))
    name, quote = lark_string(msgspec.json.encode(tool.input_name).decode()), lark_string('"')
    return f'"{{" " "? {name} " "? ":" " "? {quote} @input_{number} {quote} " "? "}}"'
