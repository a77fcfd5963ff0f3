from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety_text.errors import UnusableStop
from moiety_text.stop import StopFinder, new_stop_finder

letters = st.text(alphabet="ab", max_size=25)
stops_of = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def search_whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the stop string in the whole text, by the plainest method."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def add_in_pieces(finder: Any, text: str, cuts: list[int]) -> tuple[str, str | None]:
    """Give a finder the text in pieces until it finds a stop; return the text that it released, and the stop."""
    given_out = ""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        piece, matched = finder.add(text[start:end])
        given_out += piece
        if matched is not None:
            return given_out, matched
    return given_out, None


@settings(max_examples=400)
@given(text=letters, stops=stops_of, cuts=st.lists(st.integers(0, 25)))
def test_any_cutting_into_pieces_finds_what_a_search_of_the_whole_finds(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    finder = StopFinder(stops)
    given_out, matched = add_in_pieces(finder, text, cuts)
    if matched is None:
        given_out += finder.flush()
    assert (given_out, matched) == search_whole(text, stops)
    assert not any(stop in given_out for stop in stops)


@settings(max_examples=300)
@given(text=letters, stops=stops_of)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    finder, given_out = StopFinder(stops), ""
    for character in text:
        piece, matched = finder.add(character)
        given_out += piece
        if matched is not None:
            return
    held = text[len(given_out) :]
    assert held == "" or any(stop.startswith(held) for stop in stops)
    longer = [text[start:] for start in range(len(given_out))]
    assert not any(stop.startswith(end) for stop in stops for end in longer)


def test_text_without_a_stop_in_sight_is_given_out_at_once() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.add("Hello.\n") == ("Hello.", None)
    assert finder.add("You") == ("\nYou", None)
    assert finder.add("\n\nUse") == ("", None)
    assert finder.add("r: more") == ("", "\n\nUser:")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UnusableStop):
        StopFinder(["a", ""])


SCRAPS = ["<t>", "</t>", "<", "/", "t>", "a", "b", "\n", "\n\n", " "]


class Marks(NamedTuple):
    opener: str = "<t>"
    closer: str = "</t>"
    is_open: bool = False
    answer_opener: str = ""


def search_after_thought(text: str, stops: list[str], *, is_open: bool) -> tuple[str, str | None]:
    """Find the stop string after the reasoning, by the plainest method."""
    begun = text.lstrip()
    if not is_open and not begun.startswith("<t>"):
        return search_whole(text, stops)
    start = text.find("</t>", 0 if is_open else text.index("<t>") + 3)
    if start < 0:
        return text, None
    start += 4
    start += len(text[start:]) - len(text[start:].lstrip())
    given, stop = search_whole(text[start:], stops)
    return text[:start] + given, stop


@settings(max_examples=600)
@given(
    text=st.lists(st.sampled_from(SCRAPS), max_size=14).map("".join),
    stops=st.lists(st.sampled_from(["\n\n", "a", "ab", "<", "\na", "</t>", "t>"]), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 40)),
    is_open=st.booleans(),
)
def test_stop_strings_apply_only_after_reasoning(text: str, stops: list[str], cuts: list[int], is_open: bool) -> None:
    finder = new_stop_finder(stops, Marks(is_open=is_open))
    assert finder is not None
    given_out, matched = add_in_pieces(finder, text, cuts)
    if matched is None:
        piece, matched = finder.finish("")
        given_out += piece
    assert (given_out, matched) == search_after_thought(text, stops, is_open=is_open)


def test_skipped_text_still_ends_the_reasoning() -> None:
    finder = new_stop_finder(["\n\n"], Marks())
    assert finder is not None
    assert finder.skip(" <t") == ""
    assert finder.skip(">Hm.\n\nSo") == " <t>Hm.\n\nSo"
    assert finder.add("\n\nthen</t>\n\nYes.\n\nMore") == ("\n\nthen</t>\n\nYes.", "\n\n")


@pytest.mark.parametrize("cut", range(8))
def test_the_stop_string_ends_the_text_where_it_is_included(cut: int) -> None:
    text = "ab<stop>"
    finder = StopFinder(["<stop>", "p>", "x"], includes_stop=True)
    first, stopped = finder.add(text[:cut])
    second, stop = finder.add(text[cut:] + "more")
    assert (stopped, stop, first + second) == (None, "<stop>", text)
