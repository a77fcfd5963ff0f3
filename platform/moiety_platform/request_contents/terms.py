"""Terms of a tenant's content logging, and the content of one request while it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

MAX_CHARS = 128 * 1024  # of a request's text, and of all its answers together; the rest is cut
MIN_KEEP_DAYS, MAX_KEEP_DAYS = 1, 90


class ContentTerms(msgspec.Struct, frozen=True):
    """Content logging of a tenant, under the opt-in with this id."""

    tenant_id: str
    keep_days: int
    opt_in_id: str


class Content(msgspec.Struct, frozen=True):
    """Text of a request and of each of its answers, as it is stored; `is_cut` says that some of it is missing."""

    input: str
    outputs: list[str]
    is_cut: bool


@dataclass(slots=True)
class CapturedContent:
    """Content of a running request, collected by its run. Owned by its record."""

    terms: ContentTerms
    input: str
    _parts: dict[int, list[str]] = field(default_factory=dict)
    _num_chars: int = 0
    _is_cut: bool = False

    def __post_init__(self) -> None:
        self._is_cut = len(self.input) > MAX_CHARS
        self.input = self.input[:MAX_CHARS]

    def add(self, index: int, text: str) -> None:
        """Append text to the answer with this number."""
        left = MAX_CHARS - self._num_chars
        if len(text) > left:
            text, self._is_cut = text[:left], True
        if text:
            self._parts.setdefault(index, []).append(text)
            self._num_chars += len(text)

    @property
    def num_chars(self) -> int:
        """Number of characters so far."""
        return len(self.input) + self._num_chars

    def content(self) -> Content:
        """Return the content so far."""
        return Content(self.input, ["".join(self._parts[index]) for index in sorted(self._parts)], self._is_cut)


def terms_of(rules: Iterable[object]) -> ContentTerms | None:
    """Return the terms among the rules for a tenant's texts; None if it did not opt in."""
    return next((one for one in rules if isinstance(one, ContentTerms)), None)
