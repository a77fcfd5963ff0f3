"""State of the gateway, and the answers that a session shows while it does not respond.

A gateway that is stopped still accepts connections, so a request to it ends after many seconds only. A short probe
before each drawing finds that out; the page then shows the last answers, marked with their time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

PROBE_TIMEOUT_S = 2.0
AWAY_PROBE_TIMEOUT_S = 0.5  # of a gateway that did not respond before: a page that waits does not react
PROBE_VALID_S = 1.0  # several parts of a page share a probe
MAX_ANSWERS = 500
OF_TIME = ("since", "until")  # parameters that differ at each drawing

AnswerKey = tuple[str, tuple[tuple[str, str], ...], int]


@dataclass(slots=True)
class StoredAnswers:
    """The last answer to each request of a session; the least recently used are forgotten."""

    _answers: OrderedDict[tuple[str, AnswerKey], Any] = field(default_factory=OrderedDict)

    def put(self, part: str, key: AnswerKey, answer: Any) -> None:
        self._answers[part, key] = answer
        self._answers.move_to_end((part, key))
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def get(self, part: str, key: AnswerKey) -> Any | None:
        return self._answers.get((part, key))


@dataclass(slots=True)
class Drawing:
    """One drawing of one part of a page: which requests it has sent, so that a repeated one is told apart."""

    part: str
    stored: StoredAnswers
    is_away: bool
    num_by_request: dict[tuple[str, tuple[tuple[str, str], ...]], int] = field(default_factory=dict)

    def key_of(self, path: str, parameters: Mapping[str, Any]) -> AnswerKey:
        """Return the key of the next request with these parameters; times in them do not count."""
        given = tuple(sorted((name, str(value)) for name, value in parameters.items() if name not in OF_TIME))
        index = self.num_by_request.get((path, given), 0)
        self.num_by_request[path, given] = index + 1
        return path, given, index


@dataclass(slots=True)
class GatewayState:
    """State of the gateway as one session knows it."""

    answers: StoredAnswers = field(default_factory=StoredAnswers)
    last_response: datetime | None = None  # UTC
    is_away: bool = False
    _probed_at: float = float("-inf")  # monotonic

    def probe(self, http: httpx.Client, url: str) -> bool:
        """Ask the gateway for its health, unless that was just done; return whether it responds."""
        if time.monotonic() - self._probed_at < PROBE_VALID_S:
            return not self.is_away
        timeout_s = AWAY_PROBE_TIMEOUT_S if self.is_away else PROBE_TIMEOUT_S
        try:
            http.get(f"{url}/healthz", timeout=timeout_s)
        except httpx.HTTPError:
            self.is_away = True
        else:
            self.note_response()
        self._probed_at = time.monotonic()
        return not self.is_away

    def note_response(self) -> None:
        self.is_away, self.last_response = False, datetime.now(UTC)

    def note_silence(self) -> None:
        """Note that a request was not answered, although the gateway responded to the probe before it."""
        self.is_away, self._probed_at = True, time.monotonic()

    def begin_drawing(self, part: str) -> Drawing:
        return Drawing(part, self.answers, self.is_away)
