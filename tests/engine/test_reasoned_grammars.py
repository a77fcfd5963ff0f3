"""Grammars that begin after the reasoning: of models with markers, and of the Harmony format's channels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import tokenizers

from moiety_demo import checkpoint_path
from moiety_engine.config import EngineConfig, Overlap
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.harmony import CONTROL_TOKENS
from moiety_platform.inference.strict_tools import grammar_of_calls
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import find_tool_format
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.grammars import GrammarKind, GrammarSpec, HarmonyGrammar, ReasonedGrammar, ToolCallGrammar
from moiety_wire.messages import Sampling
from moiety_wire.thought_budget import ThoughtBudget

TEMPLATES = Path(__file__).parents[1] / "gateway" / "templates"
TEXT = read_text_model(checkpoint_path())
MARKERS = ("<think>", "</think>")
RETURN = "<|return|>"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PLACE))
WORDS = GrammarSpec(GrammarKind.CHOICE, '["yes", "no"]')
LARK = GrammarSpec(GrammarKind.GRAMMAR, "start: A+\nA: /[ab]c/")
ANSWERS = {'{"city": "Basel"}': SCHEMA, "yes": WORDS, "acbc": LARK, "aab": GrammarSpec(GrammarKind.REGEX, "a+b")}


def tokenizer_with(special: tuple[str, ...], added: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(TEXT.tokenizer_json)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(added))
    return tokenizer


THINKING = tokenizer_with((RETURN,), MARKERS)
PLAIN = tokenizer_with((RETURN,))
HARMONY = tokenizer_with((RETURN, *CONTROL_TOKENS))


def ids_in(tokenizer: tokenizers.Tokenizer, names: tuple[str, ...]) -> dict[str, int]:
    return {name: found for name in names if (found := tokenizer.token_to_id(name)) is not None}


def spec_of(form: ReasonedGrammar | HarmonyGrammar) -> GrammarSpec:
    kind = GrammarKind.REASONED if isinstance(form, ReasonedGrammar) else GrammarKind.HARMONY
    return GrammarSpec(kind, msgspec.json.encode(form).decode())


def ends_in(tokenizer: tokenizers.Tokenizer) -> list[int]:
    return [tokenizer.token_to_id(RETURN)]


def reasoned(tokenizer: tokenizers.Tokenizer, answer: GrammarSpec, *, is_open: bool = False) -> GrammarSpec:
    return spec_of(
        ReasonedGrammar(answer, *MARKERS, is_open, ids_in(tokenizer, MARKERS), [tokenizer.token_to_id(RETURN)])
    )


def follows(tokenizer: tokenizers.Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """Return whether the whole text may be an output."""
    compiler = GrammarCompiler(tokenizer.to_str(), (tokenizer.token_to_id(RETURN),))
    state = compiler.open(spec)
    state.take(tokenizer.encode(text, add_special_tokens=False).ids)
    state.take([tokenizer.token_to_id(RETURN)])
    return not state.problem


@pytest.mark.parametrize("tokenizer", [THINKING, PLAIN], ids=["tokens", "text"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_of_any_grammar_may_follow_the_reasoning(tokenizer: tokenizers.Tokenizer, answer: str) -> None:
    spec = reasoned(tokenizer, ANSWERS[answer])
    assert follows(tokenizer, spec, answer)
    for before in ("<think>\nHm, {1} <b.\n</think>\n\n", "<think></think>"):
        assert follows(tokenizer, spec, before + answer)
        assert not follows(tokenizer, spec, before + answer + "!!")
    assert not follows(tokenizer, spec, "Hm." + answer)
    assert not follows(tokenizer, spec, "<think>Hm." + answer)
    assert not follows(tokenizer, spec, f"<think>Hm.{RETURN}</think>{answer}")
    opened = reasoned(tokenizer, ANSWERS[answer], is_open=True)
    assert follows(tokenizer, opened, "Hm.</think>\n\n" + answer)
    assert not follows(tokenizer, opened, answer)


def test_strict_calls_between_markers_of_their_own_may_follow_the_reasoning() -> None:
    way = find_tool_format((TEMPLATES / "hermes.jinja").read_text())
    assert way is not None
    calls = grammar_of_calls(way, ToolOffer((Tool("find", "", PLACE, strict=True),)), {})
    assert calls is not None
    spec = reasoned(THINKING, calls)
    call = '<tool_call>\n{"name": "find", "arguments": {"city": "Bern"}}\n</tool_call>'
    for answer in ("Sunny.", call, f"I look.\n{call}"):
        assert follows(THINKING, spec, f"<think>Hm. {call[:20]}</think>\n\n{answer}")
        assert follows(THINKING, spec, answer)
    assert not follows(THINKING, spec, "<think>Hm.</think>" + call.replace("city", "town"))


def harmony(*tools: str, answer: GrammarSpec | None = None, must_call: bool = False) -> GrammarSpec:
    offered = [ToolCallGrammar(name, json.dumps(PLACE)) for name in tools]
    return spec_of(
        HarmonyGrammar(ids_in(HARMONY, CONTROL_TOKENS), offered, answer, must_call, [HARMONY.token_to_id(RETURN)])
    )


THOUGHT = "<|channel|>analysis<|message|>Hm, {1}<|end|><|start|>assistant"
NEXT_TURN = "<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"city":"Basel"}<|call|>'
CALL_BY_ROLE = ' to=functions.find<|channel|>commentary json<|message|>{"city":"Basel"}<|call|>'


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_grammar_holds_in_the_final_channel_only(answer: str) -> None:
    spec = harmony(answer=ANSWERS[answer])
    for before in ("", THOUGHT, THOUGHT * 2):
        assert follows(HARMONY, spec, f"{before}<|channel|>final<|message|>{answer}")
        assert not follows(HARMONY, spec, f"{before}<|channel|>final<|message|>{answer}!!")
        assert not follows(HARMONY, spec, before + answer)
    assert not follows(HARMONY, spec, f"{PREAMBLE}<|channel|>final<|message|>{answer}")
    assert not follows(HARMONY, spec, CALL)


def test_reasoning_may_end_within_a_character() -> None:
    final = NEXT_TURN + '<|channel|>final<|message|>{"city": "Bern"}'
    for tokenizer, spec, begin, rest in (
        (THINKING, reasoned(THINKING, SCHEMA), "<think>", '</think>{"city": "Bern"}'),
        (
            HARMONY,
            harmony(answer=SCHEMA),
            THOUGHT.partition("Hm")[0],
            final,
        ),
    ):
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in (begin, "a🙂", rest, RETURN)]
        assert len(ids[1]) > 2
        state = GrammarCompiler(tokenizer.to_str(), (tokenizer.token_to_id(RETURN),)).open(spec)
        for token_ids in (ids[0], ids[1][:2], *ids[2:]):
            state.take(token_ids)
            assert not state.problem


def test_strict_calls_keep_to_their_schema_and_may_be_demanded() -> None:
    may, must = harmony("find", "ask"), harmony("find", "ask", must_call=True)
    for before in ("", THOUGHT, PREAMBLE, THOUGHT + PREAMBLE + THOUGHT):
        for call in (CALL, CALL_BY_ROLE, CALL.replace("find", "ask"), CALL.replace(" <|constrain|>json", "")):
            assert follows(HARMONY, may, before + call)
            assert follows(HARMONY, must, before + call) == (PREAMBLE not in before)
        assert follows(HARMONY, may, f"{before}<|channel|>final<|message|>Sunny.")
        assert not follows(HARMONY, must, f"{before}<|channel|>final<|message|>Sunny.")
        assert not follows(HARMONY, may, before + CALL.replace("city", "town"))
        assert not follows(HARMONY, may, before + CALL.replace("find", "hide"))
        assert not follows(HARMONY, may, before + CALL.replace(" <|constrain|>", ""))


def test_grammars_unsupported_after_reasoning_are_refused_with_the_reason() -> None:
    compiler = GrammarCompiler(HARMONY.to_str(), (HARMONY.token_to_id(RETURN),))
    broken = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"if": {"type": "string"}}')
    tool = HarmonyGrammar(ids_in(HARMONY, CONTROL_TOKENS), [ToolCallGrammar("find", '{"if": {"type": "string"}}')])
    for spec, told in (
        (harmony(answer=broken), "/if: the keyword 'if' is not supported"),
        (reasoned(HARMONY, broken), "/if: the keyword 'if' is not supported"),
        (spec_of(tool), "in the parameters of the tool 'find', /if: the keyword 'if' is not supported"),
        (reasoned(HARMONY, harmony()), "must not begin with reasoning again"),
        (harmony(must_call=True), "there is no tool"),
        (spec_of(HarmonyGrammar({})), "no control token <|start|>"),
        (GrammarSpec(GrammarKind.REASONED, "{"), "cannot be decoded"),
        (GrammarSpec(GrammarKind.HARMONY, "[]"), "cannot be decoded"),
    ):
        with pytest.raises(GrammarRefused) as refused:
            compiler.open(spec)
        assert told in str(refused.value)


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.ON])
def test_a_thought_budget_and_a_grammar_work_together(overlap: Overlap) -> None:
    tokenizer = Tokenizer.from_json(TEXT.tokenizer_json)
    marker_id = next(one for one in tokenizer.added_tokens if one not in TEXT.eos_token_ids)
    marker = tokenizer.added_tokens[marker_id].content
    form = ReasonedGrammar(SCHEMA, marker, marker, True, {marker: marker_id})
    closing = tuple(tokenizer.encode(f"\n{marker}\n\n"))
    budget = ThoughtBudget(9, (), (marker_id,), closing)
    more: dict[str, Any] = {"load_format": LoadFormat.DUMMY, "kv_memory_bytes": 2**23, "num_threads": 1}
    loop = load_loop(
        EngineConfig(model=str(checkpoint_path()), name="m", device="cpu", dtype="float32", overlap=overlap, **more)
    )
    prompt, eos = tokenizer.encode("What is it?"), list(TEXT.eos_token_ids)
    submits = [
        CoreSubmit(
            key, "t", STANDARD, prompt, Sampling(temperature=1.0, seed=key), 120, 0, eos, 120, b"", 0,
            grammar=spec_of(form), thought_budget=budget,
        )
        for key in range(1, 7)
    ]  # fmt: skip
    for key, result in run_all(loop, submits).items():
        assert result.finish is not None and result.finish.detail == "stop_token", key
        ids = result.token_ids
        end = ids.index(marker_id)
        assert end <= 9 + closing.index(marker_id)
        if end > 9:
            assert tuple(ids[9 : 9 + len(closing)]) == closing
        answer = tokenizer.decode(ids[end + 1 : -1]).strip()
        assert jsonschema_rs.is_valid(PLACE, json.loads(answer)), answer
