"""Common types of external engines' answers, and the interface of a server dialect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from moiety_platform.errors import PlatformError
from moiety_wire.grammars import GrammarKind
from moiety_wire.messages import FinishReason, Stopping, Submit

Token = int | str  # an id, or the text where the server sends no id


MAX_ID = MAX_COUNT = 2**31 - 1
MAX_DIGITS = 10
FINISH_REASONS: Mapping[str, FinishReason] = {  # by the servers' words; unknown words are ignored
    **dict.fromkeys(
        ("stop", "eos", "eos_token", "stop_sequence", "stop_token", "end_turn", "tool_calls", "function_call"),
        FinishReason.STOP,
    ),
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("content_filter", "safety", "sensitive", "refusal"), FinishReason.CONTENT_FILTER),
}
FAILED_FINISH = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "timeout"})


class MalformedAnswer(Exception):
    """The server's answer violates the format of its kind."""


@dataclass(frozen=True, slots=True)
class DeltaLogprob:
    token: Token
    logprob: float
    top: list[tuple[Token, float]]  # most likely first


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """Contents of one event.

    `text` None means that the text must be decoded from the ids, `token_ids` None that no ids were sent. Counts are
    totals of this request at this server. `logprobs` None means that they cannot be parsed.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[DeltaLogprob] | None = field(default_factory=list)
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_prompt_tokens: int | None = None
    finish: FinishReason | None = None  # None for unknown words
    stop_string: str | None = None  # the stop string that was found
    is_last: bool = False
    is_usage: bool = False  # only counts, which follow the finish reason


def are_ids(value: Any) -> TypeGuard[list[int]]:
    """Return whether the value is a list of possible token ids."""
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MAX_ID for one in value)


def count_of(value: Any) -> int | None:
    """Return a token count from an integer, a float or a string of digits, or None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def sent_stops(stopping: Stopping) -> list[str]:
    """Return the stop strings that are sent to the server.

    It would also find them within the reasoning, so a request with possible reasoning is searched only here.
    """
    return [] if stopping.thought is not None else list(stopping.stop)


def form_refusal(submit: Submit, known: Collection[GrammarKind]) -> str:
    """Return the name of a structured-output feature that the server lacks for the request, or "" if it lacks none."""
    if submit.grammar is None:
        return ""
    if submit.grammar.kind not in known:
        is_strict = submit.grammar.kind is GrammarKind.CALLS
        return "'strict' of tools" if is_strict else f"a form of answers of the kind {submit.grammar.kind.value!r}"
    return "to go on with an answer of a form in its middle" if submit.resumed_ids else ""


def rule_refusals(submit: Submit) -> list[str]:
    """Return the fields of the request that only vLLM has, and which others lack."""
    rules = submit.sampling.token_rules
    asked = {
        "allowed_token_ids": rules is not None and bool(rules.allowed_ids),
        "bad_words": rules is not None and bool(rules.bad_words),
        "include_stop_str_in_output": submit.stopping.includes_stop,
    }
    return [name for name, is_asked in asked.items() if is_asked]


class Dialect(Protocol):
    """Encoder of requests and decoder of answers for one kind of server."""

    @property
    def path(self) -> str:
        """Path of the endpoint, after the server's root."""
        ...

    @property
    def max_num_logprobs(self) -> int: ...

    @property
    def keeps_alive(self) -> bool:
        """True if a connection can serve another request after a stream."""
        ...

    def refusal(self, submit: Submit) -> str:
        """Return the request fields that this kind of server does not support, by OpenAI's names, or "" if none."""
        ...

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        """Return the request body for `max_tokens` tokens after the prompt."""
        ...

    def read(self, event: dict[str, Any]) -> AnswerDelta | PlatformError:
        """Decode one event, or return the error that the server ends its stream with. Raises MalformedAnswer."""
        ...
