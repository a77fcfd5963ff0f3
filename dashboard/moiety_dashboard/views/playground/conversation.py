"""The conversation of the playground, and the requests that continue it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moiety_dashboard.views.playground.stream import StreamedAnswer

TIERS = {"auto": "tenant default", "priority": "priority", "default": "standard", "flex": "flex"}  # by service_tier


@dataclass(frozen=True)
class PlaygroundSettings:
    """Fields of the form that apply to the next turn. A temperature of None is the model's default."""

    models: tuple[str, ...]
    tier: str
    max_tokens: int
    temperature: float | None
    system_prompt: str


@dataclass
class Turn:
    """One prompt, and the answer of each column."""

    prompt: str
    answers: list[StreamedAnswer]


@dataclass
class PlaygroundConversation:
    """Turns so far, oldest first. Kept in the browser session only."""

    turns: list[Turn] = field(default_factory=list)
    num_answered: int = 0  # turns with an answer, also those that are no longer kept

    def add_turn(self, turn: Turn, max_turns: int) -> None:
        """Add the newest turn, and remove the oldest beyond `max_turns`."""
        self.turns.append(turn)
        del self.turns[:-max_turns]
        self.num_answered += any(answer.text or answer.reasoning for answer in turn.answers)

    def bodies(self, settings: PlaygroundSettings, prompt: str) -> list[dict[str, Any]]:
        """Return the request of each model for the next turn."""
        return [self._body(settings, model, column, prompt) for column, model in enumerate(settings.models)]

    def _body(self, settings: PlaygroundSettings, model: str, column: int, prompt: str) -> dict[str, Any]:
        messages: list[Mapping[str, str]] = [*self._history(column), {"role": "user", "content": prompt}]
        if settings.system_prompt:
            messages.insert(0, {"role": "system", "content": settings.system_prompt})
        body: dict[str, Any] = {
            "model": model, "messages": messages, "max_tokens": settings.max_tokens, "service_tier": settings.tier,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return body

    def _history(self, column: int) -> list[Mapping[str, str]]:
        """Return the earlier turns of a column; a turn without an answer there is left out."""
        messages: list[Mapping[str, str]] = []
        for turn in self.turns:
            if column < len(turn.answers) and turn.answers[column].text:
                messages.append({"role": "user", "content": turn.prompt})
                messages.append({"role": "assistant", "content": turn.answers[column].text})
        return messages
