"""Reasoning formats of model families: the markers around the reasoning, and around the answer after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moiety_text.chat import ChatTemplate
from moiety_text.errors import UnknownFormat

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Markers of one reasoning format.

    `opener_token` is the first part of `opener` where only that is a token. Some formats also mark the answer after
    the reasoning; these markers are no part of it.
    """

    name: str
    opener: str
    closer: str
    answer_opener: str = ""
    answer_closer: str = ""
    opener_token: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Markers that may be tokens."""
        marks = (self.opener_token or self.opener, self.closer, self.answer_opener, self.answer_closer)
        return tuple(mark for mark in marks if mark)


THINK = ReasoningMarkers("think", "<think>", "</think>")
_HUNYUAN = ReasoningMarkers("hunyuan", "<think>", "</think>", "<answer>", "</answer>")
_ERNIE = ReasoningMarkers("ernie45", "<think>", "</think>", "<response>", "</response>")
_MISTRAL = ReasoningMarkers("mistral", "[THINK]", "[/THINK]")
_SEED = ReasoningMarkers("seed_oss", "<seed:think>", "</seed:think>")
_MINIMAX_M3 = ReasoningMarkers("minimax_m3", "<mm:think>", "</mm:think>")
_KIMI = ReasoningMarkers("kimi", "◁think▷", "◁/think▷")
_APERTUS = ReasoningMarkers("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
_GEMMA4 = ReasoningMarkers("gemma4", "<|channel>thought", "<channel|>", opener_token="<|channel>")
_COHERE = ReasoningMarkers(
    "cohere_command", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"
)
_GRANITE = ReasoningMarkers("granite", "Here is my thought process:", "Here is my response:")

_Rule = Callable[[ChatTemplate], bool]


def _spells(*texts: str) -> _Rule:
    return lambda template: all(template.spells(text) for text in texts)


# in the order in which a chat template is compared with them
_FORMATS: tuple[tuple[ReasoningMarkers, _Rule], ...] = (
    (_GEMMA4, _spells("<|channel>", "<channel|>")),
    (_COHERE, _spells("<|START_THINKING|>")),
    (_SEED, _spells("seed:think>")),
    (_MINIMAX_M3, _spells("mm:think>")),
    (_KIMI, _spells("◁/think▷")),
    (_APERTUS, _spells("<|inner_prefix|>")),
    (_MISTRAL, _spells("[THINK]")),
    (_GRANITE, _spells("Here is my thought process:")),
    (_HUNYUAN, _spells("</think>", "<answer>")),
    (_ERNIE, _spells("</think>", "<response>\n")),
    (THINK, lambda template: template.spells("<think>") or template.spells("</think>")),
)
FORMAT_NAMES = tuple(sorted(markers.name for markers, _ in _FORMATS))


def check_reasoning_format(name: str) -> None:
    """Raise UnknownFormat unless a format has this name, or it is `auto`."""
    if name != AUTO and name not in FORMAT_NAMES:
        raise UnknownFormat(f"--reasoning-format {name[:64]!r} is not known; use {AUTO}, {', '.join(FORMAT_NAMES)}")


def find_reasoning_markers(template: ChatTemplate, name: str = AUTO) -> ReasoningMarkers | None:
    """Return the markers by name, or those that the chat template implies.

    With `auto`, None where the model is not known to support reasoning. Raises UnknownFormat.
    """
    check_reasoning_format(name)
    for markers, is_of in _FORMATS:
        if markers.name == name or (name == AUTO and is_of(template)):
            return markers
    return None
