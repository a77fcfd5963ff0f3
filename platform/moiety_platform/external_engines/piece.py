"""What a server's stream says, whichever words it uses, and what one who speaks to such a server must know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from moiety_platform.errors import PlatformError
from moiety_wire.grammars import GrammarKind
from moiety_wire.messages import FinishReason, Stopping, Submit

Token = int | str  # an id, or the text where the server tells no id


MAX_ID = MAX_COUNT = 2**31 - 1
MAX_DIGITS = 10
FINISH_REASONS: Mapping[str, FinishReason] = {  # by the words of servers; a word that is not here is no end
    **dict.fromkeys(
        ("stop", "eos", "eos_token", "stop_sequence", "stop_token", "end_turn", "tool_calls", "function_call"),
        FinishReason.STOP,
    ),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("content_filter", "safety", "sensitive", "refusal"), FinishReason.CONTENT_FILTER),
}
FAILED_FINISH = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "timeout"})


class MalformedAnswer(Exception):
    """The server's answer is not of the form that its kind has."""


@dataclass(frozen=True, slots=True)
class DeltaLogprob:
    token: Token
    logprob: float
    top: list[tuple[Token, float]]  # the best first


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What one event says. `text` None means that it is to be made of the ids; `token_ids` None, that they are not
    told. Counts are totals of this very request. `logprobs` None means that they cannot be read."""

    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[DeltaLogprob] | None = field(default_factory=list)
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    finish: FinishReason | None = None  # as far as it is known
    stop_string: str | None = None  # that made it stop
    is_last: bool = False
    is_usage: bool = False  # the counts alone, which follow the finish reason


def are_ids(value: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of what may be tokens."""
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_ID for one in value)


def count_of(value: Any) -> int | None:
    """A number of tokens, as an integer, a float or a string of digits; None for what is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def sent_stops(stopping: Stopping) -> list[str]:
    """The stop strings that the server is to look for. It would find them within a thought too, so where there may be
    one they are looked for here alone."""
    return [] if stopping.thought is not None else list(stopping.stop)


def form_refusal(submit: Submit, known: Collection[GrammarKind]) -> str:
    """What such a server cannot do for a request whose answer must be something; "" if nothing."""
    if submit.guide is None:
        return ""
    if submit.guide.kind not in known:
        is_strict = submit.guide.kind is GrammarKind.CALLS
        return "'strict' of tools" if is_strict else f"a form of answers of the kind {submit.guide.kind.value!r}"
    return "to go on with an answer of a form in its middle" if submit.resumed_ids else ""


class Dialect(Protocol):
    """How requests are put to one kind of server, and how its answers are read."""

    @property
    def path(self) -> str:
        """Of the endpoint, after the server's root."""
        ...

    @property
    def max_num_logprobs(self) -> int: ...

    @property
    def keeps_alive(self) -> bool:
        """Whether a connection serves another request after a stream."""
        ...

    def refusal(self, submit: Submit) -> str:
        """The fields of the request that this kind of server cannot honour, by OpenAI's names; "" if there are none."""
        ...

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        """The request: that many tokens after that prompt."""
        ...

    def read(self, event: dict[str, Any]) -> AnswerDelta | PlatformError:
        """What one event says; the error that the server ends its stream with. Raises MalformedAnswer."""
        ...
