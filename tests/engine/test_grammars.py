"""Grammars in the step loop, with random weights: nothing but the grammar makes an answer valid."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
import torch

from moiety_demo import checkpoint_path
from moiety_engine.config import EngineConfig, Overlap, Speculate
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.sampling.token_masks import TokenMasks, ban_others, write_out
from moiety_engine.startup import load_loop
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_platform.inference.strict_tools import grammar_of_calls
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Call
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import find_tool_format
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import FailureCode, FinishReason, Sampling
from moiety_wire.trace_events import EventKind

TEMPLATES = Path(__file__).parents[1] / "gateway" / "templates"
TEXT = read_text_model(checkpoint_path())
TOKENIZER = Tokenizer.from_json(TEXT.tokenizer_json)
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "day": {"type": "string", "format": "date"},
        "how": {"anyOf": [{"enum": ["wet", "dry"]}, {"type": "integer", "minimum": 3, "maximum": 40}]},
    },
    "required": ["city", "day", "how"],
    "additionalProperties": False,
}
SCHEMA = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(PLACE))


@pytest.fixture(scope="module")
def model() -> EngineLoop:
    return make_loop()


def make_loop(**settings: Any) -> EngineLoop:
    settings = {"load_format": LoadFormat.DUMMY, "kv_memory_bytes": 2**23, "num_threads": 1, **settings}
    return load_loop(EngineConfig(model=str(checkpoint_path()), name="m", device="cpu", dtype="float32", **settings))


def asked(key: int, grammar: GrammarSpec | None = SCHEMA, **more: Any) -> CoreSubmit:
    prompt = TOKENIZER.encode("What is it?")
    eos, sampling = list(TEXT.eos_token_ids), Sampling(temperature=1.0, seed=key)
    submit = CoreSubmit(key, "t", STANDARD, prompt, sampling, 120, 0, eos, 120, b"", 0, grammar=grammar)
    return msgspec.structs.replace(submit, **more)


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids)


def complaint(document: str, schema: dict[str, Any]) -> str:
    try:
        jsonschema_rs.validator_for(schema, validate_formats=True).validate(json.loads(document))
    except ValueError as exc:
        return str(exc)
    return ""


def test_answers_are_valid_and_the_same_with_steps_that_overlap_with_drafts_and_when_preempted(
    model: EngineLoop,
) -> None:
    kv_bytes = 14 * model.executor.model.kv_bytes_per_block(16)
    few = {"kv_memory_bytes": kv_bytes, "block_size": 16, "host_kv_memory_bytes": 0}
    answers, preempted = [], []
    for settings in (
        {"overlap": Overlap.OFF},
        {"overlap": Overlap.ON},
        {"overlap": Overlap.OFF, "speculate": Speculate.NGRAM},
        {"overlap": Overlap.ON, "max_context_tokens": 160, **few},
    ):
        loop = make_loop(**settings)
        found = run_all(loop, [asked(key, SCHEMA if key % 3 else None) for key in range(1, 13)])
        answers.append([found[key].token_ids for key in range(1, 13)])
        events = [event.kind for key in found for event in found[key].finish.events]
        preempted.append(events.count(EventKind.PREEMPTED))
        documents = [text_of(found[key].token_ids) for key in range(1, 13) if key % 3]
        assert [complaint(document, PLACE) for document in documents] == [""] * 8
        assert all(found[key].finish.detail == "stop_token" for key in range(1, 13) if key % 3)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert preempted[:3] == [0, 0, 0]
    assert preempted[3] > 0


def test_an_answer_goes_on_in_its_middle_on_another_engine(model: EngineLoop) -> None:
    whole = run_all(model, [asked(1)])[1].token_ids
    for count in (1, 5, len(whole) - 1):
        rest = run_all(model, [asked(1, resumed_ids=whole[:count])])[1].token_ids
        assert whole[:count] + rest == whole


def test_an_answer_that_is_not_of_its_form_is_ended_and_no_other(model: EngineLoop) -> None:
    model.submit(asked(1, resumed_ids=TOKENIZER.encode("never JSON")))
    model.submit(asked(2))
    failures, tokens = [], []
    while not model.scheduler.idle or model.waits_for_others:
        model.step()
        step = model.take_outputs()
        if step is not None:
            failures += step.failures
            tokens += [token for output in step.outputs for token in output.token_ids if output.key == 2]
    assert [(failure.key, failure.code) for failure in failures] == [(1, FailureCode.GRAMMAR_REFUSED)]
    assert complaint(text_of(tokens), PLACE) == ""


def test_other_requests_run_while_a_grammar_compiles_and_aborts_are_reported(model: EngineLoop) -> None:
    slow = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"{i} {i * i}" for i in range(9000)]}))
    model.submit(asked(1, None, max_tokens=8))
    for key in (2, 3):
        model.submit(asked(key, slow, credit_tokens=1))
    model.extend(2, 60, last=True)
    model.abort(3)
    outputs = []
    while not model.scheduler.idle or model.waits_for_others:
        model.step()
        step = model.take_outputs()
        outputs += [] if step is None else step.outputs
    ends = {output.key: output.finish for output in outputs if output.finish is not None}
    assert ends[3].reason is FinishReason.ABORT and ends[3].num_output_tokens == 0
    document = text_of([token for output in outputs if output.key == 2 for token in output.token_ids])
    assert json.loads(document) in json.loads(slow.text)["enum"]
    assert [output.key for output in outputs].index(1) < [output.key for output in outputs].index(2)


# ── strict tools ──

TOOLS = (Tool("now", "", {"type": "object"}), Tool("forecast", "", PLACE, strict=True))
MARKER = "<|im_start|>"  # a special token of this tokenizer, in the place of those that mark calls elsewhere


def way_of(family: str) -> Any:
    file = TEMPLATES / f"{family}.jinja"
    if not file.exists():
        file = TEMPLATES.parents[1] / "text" / "templates" / file.name
    way = find_tool_format("{{ tools }}{{ messages[0].tool_calls }}" + file.read_text())
    assert way is not None
    return way


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral", "gemma4", "lfm2", "llama4_pythonic", "mistral_ids"])
@pytest.mark.parametrize("forced", [None, "forecast"])
def test_a_strict_tool_that_must_be_called_is_called_with_arguments_of_its_schema(
    model: EngineLoop, family: str, forced: str | None
) -> None:
    way, offer = way_of(family), ToolOffer(TOOLS[1:], must_call=True, forced=forced, parallel=False)
    grammar = grammar_of_calls(way, offer, {})
    for key in range(1, 4):
        result = run_all(model, [asked(key, grammar)])[key]
        (call,) = way.new_reader(offer, is_rest=False).read(text_of(result.token_ids))
        assert isinstance(call, Call) and call.name == "forecast"
        assert complaint(call.arguments, PLACE) == ""


@pytest.mark.parametrize(("family", "opener"), [("hermes", "<tool_call>"), ("hermes", MARKER), ("llama", '{"name": "')])
def test_a_call_that_the_model_begins_by_itself_keeps_to_the_schema_beside_text(
    model: EngineLoop, family: str, opener: str
) -> None:
    way, offer = way_of(family), ToolOffer(TOOLS, parallel=False)
    special = {}
    if opener == MARKER:
        reader = type("MarkedReader", (way.reader,), {"opener": MARKER})
        way = replace(way, reader=reader, markers=(MARKER,), to_name=way.to_name.replace("<tool_call>", MARKER))
        special = {MARKER: TOKENIZER.encode(MARKER)[0]}
    begun = ("" if family == "llama" else "Let me see.") + opener
    begun += "" if family == "llama" else '\n{"name": "'
    ids = TOKENIZER.encode(begun + "forecast")
    result = run_all(model, [asked(1, grammar_of_calls(way, offer, special), resumed_ids=ids)])[1]
    arguments = re.search(r'"(?:arguments|parameters)": ?(\{.*\})\}', text_of(result.token_ids), re.DOTALL)
    assert arguments is not None and complaint(arguments[1], PLACE) == ""
    free = run_all(model, [asked(2, grammar_of_calls(way, offer, special), max_tokens=12)])[2]
    assert free.finish is not None and free.finish.detail == "max_tokens"


EBNF = """# a comment
root ::= "<" (word | number) ">"
word ::= [a-z]{2,4}
number ::= [0-9]+ ("." [0-9]{2})?
"""


def test_answers_follow_a_grammar_in_ebnf(model: EngineLoop) -> None:
    done = run_all(model, [asked(key, GrammarSpec(GrammarKind.GRAMMAR, EBNF)) for key in range(8)])
    ended = [text_of(one.token_ids) for one in done.values() if one.finish.reason is FinishReason.STOP]
    assert ended and all(re.fullmatch(r"<([a-z]{2,4}|[0-9]+([.][0-9]{2})?)>", text) for text in ended), ended


# ── what is refused ──


def test_schemas_of_many_kinds_are_kept_to(model: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from schemas import SchemaMaker
    from structured import Text, check_documents

    maker = SchemaMaker(11)
    found = check_documents(model, Text(checkpoint_path()), [maker.make() for _ in range(24)])
    assert found["wrong"] == [] and found["valid"] >= 22, found


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (GrammarKind.JSON_SCHEMA, '{"if": {"type": "string"}}', "/if: the keyword 'if' is not supported"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "string", "format": "color"}',
            "/format: the format 'color' is not supported",
        ),
        (GrammarKind.JSON_SCHEMA, "[", "not a valid JSON schema"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no document can satisfy it"),
        (GrammarKind.CHOICE, '["a", ""]', "none of them empty"),
        (GrammarKind.REGEX, "(a", "the group is not closed"),
        (GrammarKind.GRAMMAR, "root ::= a", "the EBNF grammar cannot be read: Rule 'a' not found"),
        (GrammarKind.GRAMMAR, 'expr ::= "a"', "its first rule must be `root ::= …`"),
        (GrammarKind.GRAMMAR, f'root ::= {"(" * 9000}"a"', "the EBNF grammar cannot be read"),
        (GrammarKind.GRAMMAR, "root ::= a{1000}\na ::= b{1000}\nb ::= [x]", "the terminal A has more than 50,000"),
        (GrammarKind.GRAMMAR, "of no rule at all", "Expected"),
        (GrammarKind.GRAMMAR, "start: A\nA: B{1000}\nB: C{1000}\nC: /x/", "the terminal A has more than 50,000"),
    ],
)
def test_unsupported_grammars_are_refused_by_name(kind: GrammarKind, text: str, told: str) -> None:
    library = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)
    with pytest.raises(GrammarRefused) as refused:
        library.open(GrammarSpec(kind, text))
    assert told in str(refused.value)


# ── masks ──


@pytest.mark.parametrize("vocab_size", [64, 90, 96, 130])
def test_tokens_are_banned_alike_from_bits_on_a_device_and_from_bools_on_a_processor(vocab_size: int) -> None:
    rows, words = [1, 3], np.random.default_rng(1).integers(-(2**31), 2**31, (2, 3)).astype(np.int32)
    banned = np.empty((2, vocab_size), dtype=np.bool_)
    write_out(words, banned)
    logits = torch.randn(4, vocab_size)
    expected = logits.clone()
    for j, i in enumerate(rows):
        for token in range(vocab_size):
            if token >= 96 or not (int(words[j, token // 32]) >> (token % 32)) & 1:
                expected[i, token] = -torch.inf
    for allowed in (TokenMasks(rows, words), TokenMasks(rows, words, banned)):
        found = logits.clone()
        ban_others(found, allowed, torch.from_numpy)
        assert torch.equal(found, expected)
