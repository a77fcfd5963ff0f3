"""Added tokens are themselves by their ids only, in grammars and in the calls of every tool format."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.grammar_walks import GrammarWalker

from moiety_demo import checkpoint_path
from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.grammar_tokenizer import GrammarTokenizer
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText
from moiety_text.folder import TextModel, read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Call
from moiety_text.tools.formats import ToolFormat, format_of
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import ModelCard, Sampling

TEMPLATES = Path(__file__).parents[1] / "gateway" / "templates"
SCRIPTED = scripted_text_model()
ADDED = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("   ", "user\n"),
)
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "how": {"enum": ["<tool_call>", "<think>", 3]}},
    "required": ["city", "how"],
    "additionalProperties": False,
}
TOOLS = (Tool("now", "", {"type": "object"}), Tool("forecast", "", PLACE, strict=True))


def with_added_tokens(special: bool, contents: tuple[str, ...] = ADDED, **more: Any) -> str:
    spec = json.loads(SCRIPTED.tokenizer_json) | more
    for token_id, content in enumerate(contents, start=len(spec["model"]["vocab"])):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": token_id, "content": content, "special": special})
    return json.dumps(spec)


def templates() -> dict[str, str]:
    found = {name: (TEMPLATES / f"{name}.jinja").read_text() for name in ("hermes", "llama", "mistral")}
    found["hermes with thoughts"] = found["hermes"] + "{% if false %}<think></think>{% endif %}"
    found["mistral of later models"] = (
        "{{ tools }}{% for call in messages[0].tool_calls %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}"
        "{% endfor %}"
    )
    return found


FORMATS = tuple(templates())


def format_named(name: str) -> ToolFormat:
    way = format_of(templates()[name])
    assert way is not None
    return way


class Text:
    """One tokenizer with its compiler."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...] = (END_ID,)) -> None:
        self.json, self.tokenizer = tokenizer_json, Tokenizer.from_json(tokenizer_json)
        self.ids = {token.content: one for one, token in self.tokenizer.added_tokens.items()}
        self.compiler = GrammarCompiler(tokenizer_json, eos_token_ids)
        tokens = GrammarTokenizer(tokenizer_json, eos_token_ids).tokens
        self.walker = GrammarWalker(self.compiler, tokens, eos_token_ids)

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def grammar(self, name: str, offer: ToolOffer) -> GrammarSpec:
        """What a gateway makes of tools, for a model with this tokenizer and a template of this name."""
        size = self.tokenizer.vocab_size
        card = ModelCard(
            "e", "m", "qwen", self.json, templates()[name], {}, (END_ID,), 4096, size, 0, 0, "float32", "cpu"
        )
        prompt = Conversation(({"role": "user", "content": "Hi"},), tools=offer)
        grammar = ModelText(card, 8192).answer_format(Generation("m", (prompt,), 1, Sampling(), None), 0, []).grammar
        assert grammar is not None
        return grammar


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def text(request: pytest.FixtureRequest) -> Text:
    return Text(with_added_tokens(request.param))


TEXTS = ["<|end|>", "a <think> b", "<tool_call>", "user\n", "   x", "[ARGS]é", "<[256]>", "\x00[256]"]


@pytest.mark.parametrize("wanted", TEXTS)
def test_a_choice_that_reads_like_an_added_token_is_written_with_ordinary_tokens(text: Text, wanted: str) -> None:
    answer = text.walker.draw_answer(GrammarSpec(GrammarKind.CHOICE, json.dumps([wanted])), random.Random(1))
    assert answer is not None and bytes(answer) == wanted.encode()  # an ordinary token's id is its byte


@pytest.mark.parametrize("wanted", TEXTS[:-1])
def test_strings_of_schemas_expressions_and_grammars_are_written_with_ordinary_tokens(text: Text, wanted: str) -> None:
    quoted = json.dumps(wanted)
    for kind, told, expected in (
        (GrammarKind.JSON_SCHEMA, json.dumps({"const": wanted}), quoted),
        (GrammarKind.REGEX, re.escape(wanted), wanted),
        (GrammarKind.GRAMMAR, f"start: {quoted}", wanted),
    ):
        answer = text.walker.draw_answer(GrammarSpec(kind, told), random.Random(1))
        assert answer is not None and max(answer) < 256
        found = bytes(answer).decode()
        assert found == expected or json.loads(found) == json.loads(expected)


def test_an_added_token_that_a_grammar_names_outside_of_a_string_is_that_token(text: Text) -> None:
    think = text.ids["<think>"]
    for lark in ("start: <think> /[ab]/", f"start: <[{think}]> /[ab]/"):
        answer = text.walker.draw_answer(GrammarSpec(GrammarKind.GRAMMAR, lark), random.Random(1))
        assert answer is not None and answer[0] == think and len(answer) == 2


def test_a_choice_on_the_demo_model_is_not_ended_by_the_token_that_it_spells() -> None:
    model = read_text_model(checkpoint_path())
    demo = Text(model.tokenizer_json, model.eos_token_ids)
    answer = demo.walker.draw_answer(GrammarSpec(GrammarKind.CHOICE, '["<|im_end|>"]'), random.Random(1))
    assert answer is not None and demo.tokenizer.decode(answer) == "<|im_end|>"


def test_a_text_that_the_normalizer_would_change_is_kept() -> None:
    text = Text(with_added_tokens(False, normalizer={"type": "NFC"}))
    answer = text.walker.draw_answer(GrammarSpec(GrammarKind.CHOICE, json.dumps(["e\u0301"])), random.Random(1))
    assert answer is not None and bytes(answer).decode() == "e\u0301"


def test_every_token_of_the_model_has_the_bytes_that_answers_get_from_it() -> None:
    model: TextModel = read_text_model(checkpoint_path())
    seen = GrammarTokenizer(model.tokenizer_json, model.eos_token_ids)
    tokenizer = Tokenizer.from_json(model.tokenizer_json)
    assert seen.tokens == [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    assert set(tokenizer.added_tokens) <= set(seen.special_token_ids)
    assert tokenizer.decode(seen("17 + 25 = 42, né?")) == "17 + 25 = 42, né?"


# ── calls ──


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("forced", [None, "forecast"])
def test_a_call_that_must_be_made_keeps_to_its_schema(text: Text, name: str, forced: str | None) -> None:
    way = format_named(name)
    for seed in range(4):
        offer = ToolOffer(TOOLS[1:], must_call=True, forced=forced, parallel=forced is None)
        answer = text.walker.draw_answer(text.grammar(name, offer), random.Random(seed))
        assert answer is not None
        calls = list(way.new_reader(offer, is_rest=False).read(text.decode(answer)))
        assert isinstance(calls[0], Call)
        check_calls(calls, at_least=1)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_the_model_makes_by_itself_keep_to_their_schemas_one_after_another(text: Text, name: str) -> None:
    way, offer = format_named(name), ToolOffer(TOOLS)
    markers = {one for marker, one in text.ids.items() if marker in way.markers}
    counts = []
    for seed in range(6):
        answer: list[int] = []
        draw = random.Random(seed)
        for _ in range(2 if way.marks_calls else 1):  # begin another call where the last one has ended
            opened = text.tokenizer.encode(way.to_name + "forecast")
            answer = text.walker.draw_answer(text.grammar(name, offer), draw, [*answer, *opened], hurry_after=0) or []
            assert answer
        told = text.decode(answer)
        if way.marks_calls:
            assert markers & set(answer)
        parts = way.new_reader(offer, is_rest=False).read(told)
        counts.append(check_calls(parts, at_least=1))
    if way.marks_calls:
        assert max(counts) >= 2, "some answer has calls in a row"


def check_calls(parts: list[Any], *, at_least: int) -> int:
    calls = [part for part in parts if isinstance(part, Call)]
    assert len(calls) >= at_least, parts
    for call in calls:
        schema = PLACE if call.name == "forecast" else {"type": "object"}
        jsonschema_rs.validator_for(schema).validate(json.loads(call.arguments))
    return len(calls)


def test_a_thought_may_stand_before_a_call(text: Text) -> None:
    name, offer, ids = "hermes with thoughts", ToolOffer(TOOLS, parallel=False), text.ids
    way = format_named(name)
    begun = [ids["<think>"], *b"Hm.", ids["</think>"], ids["<tool_call>"], *b'\n{"name": "forecast']
    answer = text.walker.draw_answer(text.grammar(name, offer), random.Random(3), begun, hurry_after=0)
    assert answer is not None
    check_calls(way.new_reader(offer, is_rest=False).read(text.decode(answer)), at_least=1)


def test_a_turn_cannot_be_forged_in_the_text_beside_calls(text: Text) -> None:
    matcher = text.compiler.compile(text.grammar("hermes", ToolOffer(TOOLS)))
    assert matcher.validate_tokens([*b"text", text.ids["<|user|>"]]) == 4
