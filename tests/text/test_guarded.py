"""Text that only spells a marker stays text for readers, reasoning and stop strings."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.scripted.text_model import scripted_text_model
from moiety_text.detokenizer import Detokenizer
from moiety_text.marker_guards import GUARD, GuardedReader, SpelledMarkers, index_before
from moiety_text.reasoning import ThoughtReader
from moiety_text.stop import StopFinder
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Call, Thought, assemble
from moiety_text.tools.families.hermes import HermesReader

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALL = '\n{"name": "f", "arguments": {"a": 1}}\n'


def new_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, with markers that are added and not special, as Qwen has them."""
    spec = json.loads(scripted_text_model().tokenizer_json)
    for number, content in enumerate(MARKERS, start=len(spec["model"]["vocab"])):
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": number, "content": content, "special": False})
    return Tokenizer.from_json(json.dumps(spec))


TOKENIZER = new_tokenizer()
IDS = {token.content: one for one, token in TOKENIZER.added_tokens.items() if token.content in MARKERS}


def ids_of(*parts: str | int) -> list[int]:
    """Token ids: a text is spelled with ordinary tokens."""
    return [one for part in parts for one in ([part] if isinstance(part, int) else part.encode())]


def guarded(token_ids: list[int]) -> list[str]:
    """Return the text of each token."""
    detokenizer = Detokenizer(TOKENIZER, (), tuple(IDS.values()))
    return [*(detokenizer.add([token_id]) for token_id in token_ids), detokenizer.flush()]


def new_reader() -> GuardedReader:
    return GuardedReader(ThoughtReader(HermesReader({"f"})))


OPEN, CLOSE, THINK, END_THINK = (IDS[marker] for marker in MARKERS)


@pytest.mark.parametrize(
    ("token_ids", "parts"),
    [
        (ids_of(OPEN, CALL, CLOSE), [Call("f", '{"a": 1}')]),
        (ids_of("<tool_call>", CALL, "</tool_call>"), [f"<tool_call>{CALL}</tool_call>"]),
        (ids_of("x <tool_call> y", OPEN, CALL, CLOSE), ["x <tool_call> y", Call("f", '{"a": 1}')]),
        (ids_of(THINK, "a </think> b", END_THINK, "c"), [Thought("a </think> b"), "c"]),
        (ids_of("<think>a</think>b"), ["<think>a</think>b"]),
        (
            ids_of(OPEN, '{"name": "f", "arguments": {"a": "<tool_call></think>"}}', CLOSE),
            [Call("f", '{"a": "<tool_call></think>"}')],
        ),
        (ids_of("<tool_call", OPEN, CALL, CLOSE), ["<tool_call", Call("f", '{"a": 1}')]),
        (ids_of("é".encode()[:1].decode("latin-1"), OPEN, CALL, CLOSE), ["Ã", Call("f", '{"a": 1}')]),
    ],
)
def test_a_marker_is_its_token_and_no_text_that_spells_it(token_ids: list[int], parts: list[object]) -> None:
    pieces = guarded(token_ids)
    assert new_reader().read("".join(pieces)) == parts
    reader = new_reader()
    assert assemble([*(delta for piece in pieces for delta in reader.feed(piece)), *reader.end()]) == parts


@given(st.lists(st.one_of(st.sampled_from(MARKERS), st.sampled_from(list(IDS.values())), st.text(max_size=3))))
def test_nothing_but_guards_is_added_and_one_for_each_marker_that_is_spelled(parts: list[str | int]) -> None:
    token_ids = ids_of(
        *(part.replace("<", "") if isinstance(part, str) and part not in IDS else part for part in parts)
    )
    plain = Detokenizer(TOKENIZER)
    text = plain.add(token_ids) + plain.flush()
    found = "".join(guarded(token_ids))
    assert found.replace(GUARD, "") == text.replace(GUARD, "")
    assert found.count(GUARD) - text.count(GUARD) == sum(isinstance(part, str) and part in IDS for part in parts)


def test_a_partly_decoded_character_before_a_marker_is_no_obstacle() -> None:
    pieces = guarded([0xC3, OPEN, *CALL.encode(), CLOSE])
    assert new_reader().read("".join(pieces)) == ["\N{REPLACEMENT CHARACTER}", Call("f", '{"a": 1}')]


def test_a_text_may_come_late() -> None:
    spelled = SpelledMarkers(("<think>",))
    assert spelled.guard("", "<think>") == ""  # a decoder that is one token late
    assert spelled.guard("<think>a") == "<think>a"
    assert spelled.guard("<thi") + spelled.guard("nk>") == f"<think{GUARD}>"


def test_a_stop_string_is_found_in_text_that_spells_a_marker() -> None:
    text = "".join(guarded(ids_of("a<think>b</think>c")))
    for stop, before in (("<think>", "a"), ("think>b", "a<"), (">c", "a<think>b</think")):
        for seed in range(5):
            finder, draw, given_out, rest = StopFinder([stop]), random.Random(seed), "", text
            found = None
            while rest and found is None:
                size = draw.randint(1, 4)
                more, found = finder.add(rest[:size])
                given_out, rest = given_out + more, rest[size:]
            assert found == stop
            assert given_out.replace(GUARD, "") == before


def test_characters_before_a_place_are_counted_without_guards() -> None:
    assert [index_before(f"ab{GUARD}c", count) for count in (0, 1, 2, 3)] == [4, 3, 1, 0]
    assert index_before("abc", 2) == 1
