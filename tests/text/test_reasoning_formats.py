"""The reasoning markers of every family separate reasoning from the answer, independently of the chunks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_text.chat import ChatTemplate
from moiety_text.errors import UnknownFormat
from moiety_text.reasoning import ThoughtFormat, UnwrappingReader, thoughts_of
from moiety_text.reasoning_formats import FORMAT_NAMES, find_reasoning_markers
from moiety_text.stop import new_stop_finder
from moiety_text.tools.deltas import Call, Thought, assemble
from moiety_text.tools.families.lists import HunyuanListReader

# the family's markers as its template has them, and an answer of a model of the family
FAMILIES = {
    "think": ("{{ '<think>' }}", "<think>\nHm.\n</think>\n\nYes."),
    "hunyuan": ("{{ '<think></think>' }}{{ '<answer>' }}", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"),
    "ernie45": ("{{ '</think>' }}{{ '<response>\\n' }}", "<think>\nHm.\n</think>\n\n<response>\nYes.\n</response>\n"),
    "mistral": ("{{ '[THINK]' }}", "[THINK]Hm.[/THINK]Yes."),
    "seed_oss": ("{{ '<seed:think>' }}", "<seed:think>Hm.</seed:think>Yes."),
    "minimax_m3": ("{{ '<mm:think>' }}", "<mm:think>Hm.</mm:think>Yes."),
    "kimi": ("{{ '◁think▷◁/think▷' }}", "◁think▷Hm.◁/think▷Yes."),
    "apertus": ("{{ '<|inner_prefix|>' }}", "<|inner_prefix|>Hm.<|inner_suffix|>Yes."),
    "gemma4": ("{{ '<|channel>thought\\n<channel|>' }}", "<|channel>thought\nHm.<channel|>Yes."),
    "cohere_command": (
        "{{ '<|START_THINKING|>' }}",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
    ),
    "granite": (
        "{{ 'Write after Here is my thought process: and' }}",
        "Here is my thought process: Hm. Here is my response: Yes.",
    ),
}


class Marks(NamedTuple):
    opener: str
    closer: str
    answer_opener: str
    is_open: bool = False


def form_of(name: str) -> ThoughtFormat:
    found = thoughts_of(ChatTemplate(FAMILIES[name][0], {}))
    assert found is not None
    return found


def test_every_format_has_a_template_here() -> None:
    assert set(FAMILIES) == set(FORMAT_NAMES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_shows_its_format_which_has_a_name(name: str) -> None:
    assert form_of(name).markers.name == name
    plain = ChatTemplate("{{ messages }}", {})
    assert find_reasoning_markers(plain) is None
    assert find_reasoning_markers(plain, name) == form_of(name).markers


def test_a_format_that_does_not_exist_is_refused_with_the_names() -> None:
    with pytest.raises(UnknownFormat, match="use auto, apertus"):
        thoughts_of(ChatTemplate("", {}), "thoughts")


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_is_separated_from_the_answer_at_every_cut(name: str) -> None:
    form, text = form_of(name), FAMILIES[name][1]
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        reader = form.new_reader("<|assistant|>", None)
        deltas = [delta for piece in pieces for delta in reader.feed(piece)]
        assert assemble([*deltas, *reader.end()]) == [Thought("Hm."), "Yes."]


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_that_the_prompt_has_opened_needs_no_opener(name: str) -> None:
    form = form_of(name)
    text = FAMILIES[name][1].removeprefix(form.markers.opener)
    assert form.new_reader(f"<|assistant|>{form.markers.opener}\n", None).read(text) == [Thought("Hm."), "Yes."]
    assert form.is_open_after(form.markers.opener) and not form.is_open_after(form.markers.closer)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stop", ["m", ".", "\n", "<", "Y", "Here"])
def test_stops_act_after_the_reasoning_and_the_markers_around_it(name: str, stop: str) -> None:
    markers, text = form_of(name).markers, FAMILIES[name][1]
    at = text.index("Yes") + len("Yes")
    for pieces in ([text[:at]], list(text[:at])):
        finder = new_stop_finder([stop], Marks(markers.opener, markers.closer, markers.answer_opener))
        assert finder is not None
        given_out, found = "", None
        for piece in pieces:
            shown, found = finder.add(piece)
            given_out += shown
            if found is not None:
                break
        assert found == ("Y" if stop == "Y" else None)
        assert (given_out + finder.flush() if found is None else given_out) == (text[: at - 3] if found else text[:at])


ANSWERS = [
    ("<answer>\nYes.\n</answer>\n", "Yes."),
    ("\n<answer>Yes. </answer> and more", "Yes.and more"),
    ("<answer>cut </ans", "cut </ans"),
    (" plain <answer>x</answer>", " plain <answer>x</answer>"),
    ("<answ", "<answ"),
    ("<answer></answer>", ""),
    ("", ""),
]


@pytest.mark.parametrize(("text", "shown"), ANSWERS)
@given(data=st.data())
def test_the_markers_around_an_answer_are_removed_where_it_begins_with_them(
    text: str, shown: str, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = UnwrappingReader(None, "<answer>", "</answer>")
    edges = zip([0, *cuts], [*cuts, len(text)], strict=True)
    deltas = [delta for begin, end in edges for delta in reader.feed(text[begin:end])]
    assert "".join(map(str, assemble([*deltas, *reader.end()]))) == shown


def test_calls_within_a_marked_answer_are_read() -> None:
    calls = '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'
    reader = form_of("hunyuan").new_reader("", HunyuanListReader({"f"}))
    assert reader.read(f"<think>\nHm.\n</think>\n<answer>\n{calls}\n</answer>") == [Thought("Hm."), Call("f", "{}")]
