"""Two hundred random calls in every format: read back as they were rendered, wherever the text is cut or ends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import THOROUGH

from moiety_text.tools.deltas import Call, CallArguments, CallEnded, assemble

from .test_tool_families import NAMES, NESTED_NAMES, cut, format_of, may_be_written, parsed, read, render

NUM_CALLS = 200 if THOROUGH else 50
PIECES = (1, 2, 3, 7)  # sizes of pieces; all their offsets together cut at every position
ALPHABETS = ("abc", "né🌦漢\u2028\u0301", " \n\t", "<>/=[]{}()\"'\\,:|", "0123456789.-", "trueNone")
SCRAPS = ("</param", "<tool_call>", "[TOOL_CALLS]", "}}", "```", "</", '": "', "null", "<|", "🌦", " ", "\n")

Calls = list[tuple[str, dict[str, Any]]]


class CallMaker:
    """Draws answers of one to four calls whose arguments follow the schema of the tools of `test_tool_families`."""

    def __init__(self, seed: int, name: str) -> None:
        self._draw = random.Random(seed)
        self._has_bare_names = name in NESTED_NAMES

    def make(self) -> Calls:
        return [self._call() for _ in range(self._draw.choice((1, 1, 2, 3, 4)))]

    def _call(self) -> tuple[str, dict[str, Any]]:
        draw = self._draw
        if draw.random() < 0.1:
            return "now", {}
        makers = {
            "text": self._text,
            "number": self._number,
            "whole": lambda: draw.randint(-(10**12), 10**12),
            "flag": lambda: draw.random() < 0.5,
            "nothing": lambda: None,
            "perhaps": lambda: draw.choice((None, "maybe", "x y")),
            "kind": lambda: draw.choice(("a", "b c")),
            "tags": lambda: [self._text() for _ in range(draw.randrange(4))],
            "place": lambda: self._place(3),
            "more": lambda: {self._word(): self._tree(2) for _ in range(draw.randrange(4))},
        }
        chosen = draw.sample(sorted(makers), draw.randrange(5))
        return draw.choice(("forecast", "a.dotted-name_2")), {key: makers[key]() for key in chosen}

    def _text(self) -> str:
        draw = self._draw
        kind = draw.random()
        if kind < 0.15:
            return ""
        if kind < 0.2:
            return "long " * draw.randint(40, 120)
        if kind < 0.5:
            return "".join(draw.choice(SCRAPS) for _ in range(draw.randint(1, 5)))
        return "".join(draw.choice(draw.choice(ALPHABETS)) for _ in range(draw.randint(1, 12)))

    def _number(self) -> int | float:
        return self._draw.choice((0, -1, 2**53, 0.5, -1.25e-7, self._draw.uniform(-1e6, 1e6)))

    def _place(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._draw.random() < 0.7:
            found["city"] = self._text()
        if self._draw.random() < 0.5:
            found["at"] = [self._number() for _ in range(self._draw.randrange(3))]
        if depth and self._draw.random() < 0.5:
            found["parts"] = self._place(depth - 1)
        return found

    def _word(self) -> str:
        return self._draw.choice(("a", "word", "né", "x1", "snake_case"))

    def _tree(self, depth: int) -> Any:
        """A value without a schema, which formats with bare names cannot write in every way."""
        draw = self._draw
        if depth and draw.random() < 0.5:
            size = draw.randint(1 if self._has_bare_names else 0, 3)
            if draw.random() < 0.5:
                return [self._tree(depth - 1) for _ in range(size)]
            return {self._word(): self._tree(depth - 1) for _ in range(size)} or {"a": 1}
        return draw.choice((None, True, 5, -0.5, self._word(), self._word() if self._has_bare_names else self._text()))


def answers(name: str) -> Iterator[tuple[Calls, str]]:
    maker, form, num_calls = CallMaker(29, name), format_of(name), 0
    while num_calls < NUM_CALLS:
        calls = maker.make()
        if may_be_written(form, [arguments for _, arguments in calls]):
            num_calls += len(calls)
            yield calls, render(name, calls)


def pieces_of(text: str) -> Iterator[list[str]]:
    for size in PIECES:
        for offset in range(size):
            yield cut(text, list(range(offset, len(text), size)))
    if THOROUGH:
        yield from ([text[:at], text[at:]] for at in range(len(text) + 1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_random_calls_are_read_back_wherever_they_are_cut(name: str) -> None:
    form = format_of(name)
    for calls, text in answers(name):
        whole = assemble(read(form, [text]))
        assert parsed(whole) == [(tool, json.loads(json.dumps(arguments))) for tool, arguments in calls], text
        assert all(isinstance(part, Call) for part in whole)
        for pieces in pieces_of(text):
            deltas = read(form, pieces)
            assert assemble(deltas) == whole, pieces
            assert [delta.index for delta in deltas if isinstance(delta, CallEnded)] == list(range(len(calls)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_random_calls_that_end_early_are_reported_only_as_far_as_they_were_whole(name: str) -> None:
    form, draw = format_of(name), random.Random(7)
    for calls, text in answers(name):
        expected = [(tool, json.loads(json.dumps(arguments))) for tool, arguments in calls]
        for end in {draw.randrange(len(text)) for _ in range(4)}:
            deltas = read(form, [text[:end]])
            found = parsed(assemble(deltas))
            assert found == expected[: len(found)], text[:end]
            begun = {delta.index for delta in deltas if isinstance(delta, CallArguments)}
            assert begun == {delta.index for delta in deltas if isinstance(delta, CallEnded)}, "none is left unfinished"
