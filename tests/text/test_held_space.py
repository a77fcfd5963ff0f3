"""White space that readers hold back until the text after it is known."""

from __future__ import annotations

import pytest

from moiety_text.pending_whitespace import HeldSpace
from moiety_text.reasoning import ThoughtReader, UnwrappingReader
from moiety_text.stop import ThoughtSplitter
from moiety_wire.thought_budget import ThoughtMarks


def test_white_space_behind_held_white_space_is_joined_once() -> None:
    space = HeldSpace()
    assert space.take(" ", "") == " "  # the reader decides whether it holds it
    assert [space.take(text, " ") for text in ("\n", "", "  ")] == ["", "", ""]
    assert space.take("a", " ") == "\n  a"
    assert space.take(" ", "a") == " "
    assert space.take("\t", " ") == ""
    assert (space.end(), space.end()) == ("\t", "")


SPACES = [" " * 7, "\n", "\t \n"] * 40
ANSWERS = [
    [*SPACES, "<think>", *SPACES, "Hm,", *SPACES, "yes.", *SPACES, "</", *SPACES, "</think>", *SPACES, "Yes.", *SPACES],
    ["<think>", "a", *SPACES, "b", *SPACES],
    [*SPACES],
    [*SPACES, "<thin", *SPACES],
]


@pytest.mark.parametrize("pieces", ANSWERS)
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_with_much_white_space_is_read_alike_in_pieces_and_whole(pieces: list[str], is_open: bool) -> None:
    whole = ThoughtReader(None, is_open=is_open).read("".join(pieces))
    reader = ThoughtReader(None, is_open=is_open)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()
    texts = ["".join(one.text for one in deltas if type(one).__name__ == kind) for kind in ("Thinking", "Content")]
    found = ["".join(getattr(part, "text", part) for part in whole if isinstance(part, str) is plain)
             for plain in (False, True)]  # fmt: skip
    assert texts == found


@pytest.mark.parametrize("pieces", [[*SPACES, "<answer>", *SPACES, "A", *SPACES, "b", *SPACES, "</answer>", *SPACES]])
def test_an_unwrapped_answer_with_much_white_space_is_the_same_in_pieces(pieces: list[str]) -> None:
    reader = UnwrappingReader(None, "<answer>", "</answer>")
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()
    whole = UnwrappingReader(None, "<answer>", "</answer>").read("".join(pieces))
    assert (
        "".join(getattr(one, "text", "") for one in deltas) == "".join(map(str, whole)) == "A" + "".join(SPACES) + "b"
    )


def test_white_space_before_an_opener_is_passed_on_with_the_reasoning() -> None:
    splitter = ThoughtSplitter(ThoughtMarks("<think>", "</think>", False))
    found = [splitter.split(piece) for piece in [*SPACES, "<think>", "a", "</think>", "b"]]
    assert "".join(thought for thought, _ in found) == "".join(SPACES) + "<think>a</think>"
    assert "".join(rest for _, rest in found) == "b"
    waiting = ThoughtSplitter(ThoughtMarks("<think>", "</think>", False))
    assert [waiting.split(piece) for piece in SPACES] == [("", "")] * len(SPACES)
    assert waiting.flush() == "".join(SPACES)
