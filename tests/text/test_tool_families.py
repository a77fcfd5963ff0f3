"""Calls of every family: rendered by a template in the family's syntax, they are read back as they were made."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.conftest import EXAMPLES

from moiety_engine.scripted.text_model import scripted_text_model
from moiety_text.chat import ChatTemplate
from moiety_text.detokenizer import Detokenizer
from moiety_text.errors import UnknownFormat
from moiety_text.marker_guards import GuardedReader
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Call, CallEnded, Delta, assemble
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.history import ArgumentsForm
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import AUTO, FORMAT_NAMES, adapt_to_template, find_tool_format

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
# where the template is not named after its format
FORMAT_OF = {"glm47": "glm45", "mistral_v11": "mistral", "mistral_ids": "mistral"}
BY_NAME_ONLY = ("json_list",)
NESTED_NAMES = ("gemma4", "minimax_m3")  # formats whose nested names are written without quotes
UNTYPED_TEXT = ("minimax_m3",)  # formats in which text without a schema may look like a number

AROUND = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{% if message.tool_calls %}{% set ids = message.tool_calls %}"
    "{% set calls = ids | map(attribute='function') | list %}CALLS{% endif %}<|end|>{% endfor %}"
)
STRING, NUMBER = {"type": "string"}, {"type": "number"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": STRING,
        "number": NUMBER,
        "whole": {"type": "integer"},
        "flag": {"type": "boolean"},
        "nothing": {"type": "null"},
        "perhaps": {"anyOf": [STRING, {"type": "null"}]},
        "kind": {"enum": ["a", "b c"]},
        "tags": {"type": "array", "items": STRING},
        "place": {"$ref": "#/$defs/place"},
        "more": {"type": "object"},
    },
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "city": STRING,
                "at": {"type": "array", "items": NUMBER},
                "parts": {"$ref": "#/$defs/place"},
            },
        }
    },
}
TOOLS = (Tool("forecast", "", SCHEMA), Tool("a.dotted-name_2", "", SCHEMA), Tool("now", "", {"type": "object"}))
OFFER = ToolOffer(TOOLS)

scraps = st.sampled_from(
    [
        "</param",
        "<tool_call>",
        "[TOOL_CALLS]",
        "}}",
        "]",
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "None",
        "<",
        ">",
        "{",
        "né",
        "🌦",
        ",",
    ]
)
texts = st.one_of(st.text(max_size=12), st.lists(scraps, max_size=6).map("".join), st.sampled_from(["", "x" * 700]))
words = st.text("abcxyzé", min_size=1, max_size=6).filter(lambda word: word not in ("null", "None"))
numbers = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
places = st.recursive(
    st.fixed_dictionaries({}, optional={"city": texts, "at": st.lists(numbers, max_size=3)}),
    lambda inner: st.fixed_dictionaries({}, optional={"city": texts, "parts": inner}),
    max_leaves=3,
)
plain_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(words, inner, min_size=1, max_size=3),
    max_leaves=6,
)
trees = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def calls_of(name: str) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    more = st.dictionaries(words, plain_trees, max_size=3) if name in NESTED_NAMES else st.dictionaries(texts, trees)
    arguments = st.fixed_dictionaries(
        {},
        optional={
            **{"text": texts, "number": numbers, "whole": st.integers(), "flag": st.booleans(), "nothing": st.none()},
            **{
                "perhaps": st.none() | words,
                "kind": st.sampled_from(["a", "b c"]),
                "tags": st.lists(texts, max_size=3),
            },
            **{"place": places, "more": more},
        },
    )
    nothing: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.just(("now", {}))
    call = st.tuples(st.sampled_from(["forecast", "a.dotted-name_2"]), arguments) | nothing
    return st.lists(call, min_size=1, max_size=4)


def template_of(name: str) -> str:
    return AROUND.replace("CALLS", (TEMPLATES / f"{name}.jinja").read_text())


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(template_of(name), {})


@cache
def format_of(name: str) -> ToolFormat:
    source = template_of(name)
    found = find_tool_format(source, name if name in BY_NAME_ONLY else AUTO)
    assert found is not None
    return adapt_to_template(found, compiled(name))


def render(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What a model of the family writes for these calls, as its template renders them in a history."""
    form, template = format_of(name), compiled(name)
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        for i, (tool, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": made}]
    return template.render(form.adapted(messages)).split("<|assistant|>")[1].removesuffix("<|end|>")


def may_be_written(form: ToolFormat, arguments: Any) -> bool:
    """Whether the family can write these texts: one that is written as it is cannot contain the tag after it."""
    tags = [getattr(form.reader, one, "") for one in ("value_end",)] + [mark for mark in form.markers if len(mark) > 4]
    waiting, found = [arguments], True
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found = found and not any(tag and tag in one for tag in tags)
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list):
            waiting += one
    return found


def read(form: ToolFormat, pieces: list[str], offer: ToolOffer = OFFER) -> list[Delta]:
    reader = form.new_reader(offer, is_rest=False)
    return [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def parsed(parts: list[Any]) -> list[tuple[str, Any]]:
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]


EXAMPLE = [
    (
        "forecast",
        {"text": "né <b>", "number": -1.5, "flag": True, "tags": ["", "x"], "place": {"city": "B", "at": [1]}},
    ),
    ("now", {}),
]


def test_every_format_has_a_template_here() -> None:
    assert {FORMAT_OF.get(name, name) for name in NAMES} == set(FORMAT_NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_shows_its_format_which_has_a_name(name: str) -> None:
    source = template_of(name)
    by_name = find_tool_format(source, FORMAT_OF.get(name, name))
    assert by_name is not None
    assert find_tool_format(source) == (None if name in BY_NAME_ONLY else by_name)


def test_a_format_that_does_not_exist_is_refused_with_the_names() -> None:
    with pytest.raises(UnknownFormat, match=r"use auto, cohere_command, .*qwen3_coder"):
        find_tool_format("", "hermes2")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_calls_are_read_back_as_they_were_rendered_however_they_are_cut(name: str, data: st.DataObject) -> None:
    calls, form = data.draw(calls_of(name)), format_of(name)
    assume(may_be_written(form, [arguments for _, arguments in calls]))
    text = render(name, calls)
    parts = assemble(read(form, [text]))
    assert parsed(parts) == [(tool, json.loads(json.dumps(arguments))) for tool, arguments in calls]
    assert not any(isinstance(part, str) for part in parts)
    assert assemble(read(form, list(text))) == parts
    assert assemble(read(form, cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=8))))) == parts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_calls_with_text_around_them_are_read_alike_at_every_cut(name: str) -> None:
    form = format_of(name)
    before = "Let me see. " if form.marks_calls else ""
    text = before + render(name, EXAMPLE) + " Done"
    parts = assemble(read(form, [text]))
    assert parsed(parts) == EXAMPLE and "".join(part for part in parts if isinstance(part, str)).split() == (
        [*before.split(), "Done"]
    )
    for at in range(len(text) + 1):
        deltas = read(form, [text[:at], text[at:]])
        assert assemble(deltas) == parts
        assert [delta.index for delta in deltas if isinstance(delta, CallEnded)] == [0, 1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_ends_early_has_only_the_calls_that_were_whole(name: str) -> None:
    form, text = format_of(name), render(name, EXAMPLE)
    counts = []
    for at in range(len(text) + 1):
        parts = assemble(read(form, [text[:at]]))
        found = parsed(parts)
        assert found == EXAMPLE[: len(found)]
        if not found:
            assert "".join(map(str, parts)) == text[:at]
        counts.append(len(found))
    assert counts == sorted(counts) and counts[-1] == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_an_unknown_tool_is_text(name: str) -> None:
    form, text = format_of(name), render(name, [("unknown", {"text": "x"})])
    for pieces in ([text], list(text)):
        assert assemble(read(form, pieces)) == [text]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_damaged_call_is_read_alike_however_it_is_cut_and_loses_nothing(name: str, data: st.DataObject) -> None:
    form, text = format_of(name), render(name, EXAMPLE)
    begin = data.draw(st.integers(0, len(text)))
    damaged = text[:begin] + data.draw(scraps | st.just("")) + text[begin + data.draw(st.integers(0, 6)) :]
    parts = assemble(read(form, [damaged]))
    assert assemble(read(form, list(damaged))) == parts
    assert all(tool in ("forecast", "now") and isinstance(arguments, dict) for tool, arguments in parsed(parts))
    if not parsed(parts):
        assert "".join(map(str, parts)) == damaged


@pytest.mark.parametrize("name", NAMES)
def test_a_forced_call_goes_on_from_its_opening(name: str) -> None:
    form = format_of(name)
    text = render(name, EXAMPLE[:1])
    for offer in (ToolOffer(TOOLS, must_call=True), ToolOffer(TOOLS, must_call=True, forced="forecast")):
        opening = form.opening(offer).text
        assert opening
        plain = text.replace(" ", "").replace("\n", "")
        assert plain.startswith(opening.replace(" ", "").replace("\n", ""))
        begun = next(
            at for at in range(len(text)) if text[:at].split() == opening.split() or plain_end(text, at, opening)
        )
        parts = assemble(read(form, [text[begun:]], offer))
        assert parsed(parts) == EXAMPLE[:1]


def plain_end(text: str, at: int, opening: str) -> bool:
    return "".join(text[:at].split()) == "".join(opening.split())


@pytest.mark.parametrize("name", NAMES)
def test_calls_beyond_the_most_are_left_out(name: str) -> None:
    form, offer = format_of(name), ToolOffer(TOOLS, parallel=False)
    parts = assemble(read(form, [render(name, EXAMPLE)], offer))
    assert parsed(parts) == EXAMPLE[:1]


VARIANTS = [
    # the format; a call as models write it beside the way of the template; what it is
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now"/>\n</｜DSML｜tool_calls>', [("now", {})]),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>now:3<|tool_call_argument_begin|> {} <|tool_call_end|>",
        [("now", {})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=forecast><parameter=flag>true</parameter></function></tool_call>",
        [("forecast", {"flag": True})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=forecast>\n<parameter=whole>\nmany\n</parameter>\n</function>",
        [("forecast", {"whole": "many"})],
    ),
    (
        "glm45",
        "<tool_call>forecast\n<arg_key>unheard</arg_key><arg_value>[1]</arg_value></tool_call>",
        [("forecast", {"unheard": [1]})],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[forecast(tags=('a', \"b\",), flag=True)]<|python_end|>",
        [("forecast", {"tags": ["a", "b"], "flag": True})],
    ),
    ("phi4_mini", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', [("now", {})]),
    ("minimax_m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="now">\n]<]minimax[>[</invoke>', [("now", {})]),
]


@pytest.mark.parametrize(("name", "text", "calls"), VARIANTS)
def test_other_ways_in_which_models_write_calls_are_read_too(name: str, text: str, calls: list[Any]) -> None:
    parts = assemble(read(format_of(name), [text]))
    assert parsed(parts) == calls and not any(isinstance(part, str) for part in parts)
    assert assemble(read(format_of(name), list(text))) == parts


# ── markers that are tokens ──

MARKED = [name for name in NAMES if format_of(name).markers and format_of(name).marks_calls]


def tokenizer_with(markers: tuple[str, ...]) -> Tokenizer:
    """Of bytes, with these markers as added tokens."""
    spec = json.loads(scripted_text_model().tokenizer_json)
    for number, content in enumerate(markers, start=len(spec["model"]["vocab"])):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": number, "content": content, "special": True})
    return Tokenizer.from_json(json.dumps(spec))


@pytest.mark.parametrize("name", MARKED)
def test_a_call_is_told_by_the_tokens_of_its_markers_and_not_by_their_spelling(name: str) -> None:
    form, text = format_of(name), render(name, EXAMPLE)
    tokenizer = tokenizer_with(form.markers)
    marker_ids = [one for one, token in tokenizer.added_tokens.items() if token.content in form.markers]
    for token_ids, is_call in ((tokenizer.encode(text), True), (list(text.encode()), False)):
        detokenizer = Detokenizer(tokenizer, marker_ids, marker_ids)
        reader = GuardedReader(form.new_reader(OFFER, is_rest=False))
        deltas = [delta for one in token_ids for delta in reader.feed(detokenizer.add([one]))]
        parts = assemble([*deltas, *reader.feed(detokenizer.flush()), *reader.end()])
        assert parsed(parts) == (EXAMPLE if is_call else [])
        assert is_call or parts == [text]


# ── histories ──


def conversation() -> list[dict[str, Any]]:
    def call(call_id: str, name: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"n": 1732800000}}}

    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", "now"), call("b", "forecast")]},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "assistant", "content": "", "tool_calls": [call("c", "now")]},
    ]


def test_ids_of_kimi_name_the_tool_and_count_the_calls_of_the_conversation() -> None:
    adapted = format_of("kimi_k2").adapted(conversation())
    made = [call["id"] for message in adapted for call in message.get("tool_calls", ())]
    assert made == ["functions.now:0", "functions.forecast:1", "functions.now:2"]
    assert [message.get("tool_call_id") for message in adapted[2:4]] == ["functions.forecast:1", "functions.now:0"]


def test_results_of_gemma_stand_in_the_message_with_the_calls_where_its_template_reads_them_there() -> None:
    source = template_of("gemma4") + "{% if false %}{{ messages[0].tool_responses }}{% endif %}"
    form = find_tool_format(source)
    assert form is not None
    adapted = form.adapted(conversation())
    assert [message["role"] for message in adapted] == ["user", "assistant", "assistant"]
    assert adapted[1]["tool_responses"] == [
        {"name": "forecast", "response": "rain"},
        {"name": "now", "response": "noon"},
    ]


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_arguments_are_text_where_a_template_can_only_join_text(name: str) -> None:
    form = format_of(name)
    assert form.arguments is ArgumentsForm.TEXT
    assert form.adapted(conversation())[1]["tool_calls"][0]["function"]["arguments"] == '{"n": 1732800000}'
    assert format_of("hermes").arguments is ArgumentsForm.ANY


@pytest.mark.parametrize("broken", ['{"city": "Bas', "[17]", "not <JSON> at all", "7"])
@pytest.mark.parametrize("name", NAMES)
def test_every_template_renders_arguments_that_are_no_object_beside_those_that_are(name: str, broken: str) -> None:
    form, template = format_of(name), compiled(name)
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "forecast", "arguments": arguments}}
        for number, arguments in enumerate([broken, {"city": "Bern"}])
    ]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    told = template.render(form.adapted(messages)).split("<|assistant|>", 1)[1]
    assert broken in told.replace('\\"', '"') and "Bern" in told


def test_the_module_that_the_documentation_shows_is_a_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "add-a-tool-format.md").read_text()
    module: dict[str, Any] = {"__name__": "example"}
    exec(page.split("```python\n")[1].split("```")[0], module)
    family = module["EXAMPLE"]
    form = family.format_of("<call>")
    assert family.is_of("<call>") and not family.is_of("")
    text = '<call>now|{"a": 1}</call>\n<call>now|{}</call> Done'
    assert parsed(assemble(read(form, [text]))) == [("now", {"a": 1}), ("now", {})]
    assert parsed(assemble(read(form, ["{}</call>"], ToolOffer(TOOLS[2:], must_call=True)))) == [("now", {})]
