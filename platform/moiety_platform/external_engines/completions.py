"""OpenAI's streamed `/v1/completions`, generic and with the extensions of vLLM and SGLang."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from moiety_platform.engine_addresses import ExternalAddress, ExternalKind
from moiety_platform.errors import PlatformError
from moiety_platform.external_engines.dialect import (
    FAILED_FINISH,
    FINISH_REASONS,
    AnswerDelta,
    DeltaLogprob,
    MalformedAnswer,
    Token,
    are_ids,
    count_of,
    form_refusal,
    rule_refusals,
    sent_stops,
)
from moiety_platform.external_engines.failures import ended_by_error, error_of_event
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import Submit

ID_PREFIX = "token_id:"  # vLLM's prefix of tokens that are returned as ids
MAX_STOP_STRINGS = 4  # documented by OpenAI
_JSON = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA})
_FORMS = {
    ExternalKind.VLLM: _JSON | {GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.GRAMMAR},
    ExternalKind.SGLANG: _JSON | {GrammarKind.REGEX},
}


class Completions:
    """Dialect of OpenAI's completions. Implements Dialect."""

    path = "/v1/completions"
    keeps_alive = True

    def __init__(self, address: ExternalAddress) -> None:
        self._model = address.model
        self._kind = address.kind
        self._has_priority = address.priority

    @property
    def max_num_logprobs(self) -> int:
        return 5 if self._kind is ExternalKind.GENERIC else 20

    def refusal(self, submit: Submit) -> str:
        if self._kind is ExternalKind.VLLM:
            return form_refusal(submit, _FORMS[self._kind])
        if self._kind is ExternalKind.SGLANG:
            return ", ".join(filter(None, [*rule_refusals(submit), form_refusal(submit, _FORMS[self._kind])]))
        sampling, stopping = submit.sampling, submit.stopping
        asked = {
            "top_k": sampling.top_k != 0,
            "min_p": sampling.min_p != 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
            "min_tokens": stopping.min_tokens != 0,
            "stop_token_ids": bool(stopping.stop_token_ids),
            "ignore_eos": stopping.ignore_eos,
            "a form of answers": submit.grammar is not None,
            "tools or special tokens in the text": bool(submit.shown_ids),
            f"more than {MAX_STOP_STRINGS} stop strings": len(sent_stops(stopping)) > MAX_STOP_STRINGS,
        }
        return ", ".join([*(name for name, is_asked in asked.items() if is_asked), *rule_refusals(submit)])

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        sampling, stopping = submit.sampling, submit.stopping
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": sampling.temperature if sampling.top_p else 0.0,  # top_p 0 means greedy sampling,
            "top_p": sampling.top_p or 1.0,  # which these servers support as temperature 0
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
        if sampling.num_logprobs is not None:
            body["logprobs"] = max(1, sampling.num_logprobs)
        if stops := sent_stops(stopping):
            body["stop"] = stops
        if self._kind is not ExternalKind.GENERIC:
            body |= self._more(submit, min_tokens)
        return body

    def _more(self, submit: Submit, min_tokens: int) -> dict[str, Any]:
        """Return the fields of vLLM and SGLang beyond OpenAI's.

        All are sent, since a server's own defaults may differ.
        """
        sampling, stopping = submit.sampling, submit.stopping
        more: dict[str, Any] = {
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": min_tokens,
            "stop_token_ids": list(stopping.stop_token_ids),
            "ignore_eos": stopping.ignore_eos,
        }
        if submit.grammar is not None:
            more |= _form(self._kind, submit.grammar)
        if submit.cache_salt:
            more["cache_salt"] = base64.urlsafe_b64encode(submit.cache_salt).decode()
        if submit.shown_ids:  # for versions that send only text
            more["skip_special_tokens"] = False
        if self._has_priority:
            more["priority"] = submit.service.rank
        if self._kind is ExternalKind.VLLM:
            more |= _vllm_fields(submit)
        return more

    def read(self, event: dict[str, Any]) -> AnswerDelta | PlatformError:
        error = event.get("error")
        if error is not None:
            return error_of_event(error)
        num_output, num_cached = counts_of(event.get("usage"))
        choice = choice_of(event)
        if choice is None:
            is_usage = isinstance(event.get("usage"), dict)
            return AnswerDelta(text="", num_output_tokens=num_output, num_cached_tokens=num_cached, is_usage=is_usage)
        text, token_ids = choice.get("text"), choice.get("token_ids")
        if token_ids is not None and not are_ids(token_ids):
            raise MalformedAnswer("token_ids is not a list of ids")
        if not isinstance(text, str | None):
            raise MalformedAnswer("the text of a choice is not a string")
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish in FAILED_FINISH:
            return ended_by_error(finish)
        stopped = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's and SGLang's field
        return AnswerDelta(
            text=text or "" if token_ids is None else None,
            token_ids=token_ids,
            logprobs=_logprobs(choice.get("logprobs")),
            num_output_tokens=num_output,
            num_cached_tokens=num_cached,
            finish=FINISH_REASONS.get(finish) if isinstance(finish, str) else None,
            stop_string=stopped if isinstance(stopped, str) else None,
        )


def _vllm_fields(submit: Submit) -> dict[str, Any]:
    """Return the fields that only vLLM has."""
    sampling = submit.sampling
    fields: dict[str, Any] = {}
    if sampling.num_logprobs is not None:
        fields["return_tokens_as_token_ids"] = True
    if submit.stopping.includes_stop:
        fields["include_stop_str_in_output"] = True
    rules = sampling.token_rules
    if rules is not None and rules.allowed_ids:
        fields["allowed_token_ids"] = list(rules.allowed_ids)
    if rules is not None and rules.bad_words:
        fields["bad_words"] = list(rules.bad_words)
    return fields


def _form(kind: ExternalKind, grammar: GrammarSpec) -> dict[str, Any]:
    """Return the grammar in the server's own field. vLLM has it under this name since 0.11."""
    if kind is ExternalKind.VLLM:
        match grammar.kind:
            case GrammarKind.JSON_OBJECT:
                return {"structured_outputs": {"json_object": True}}
            case GrammarKind.JSON_SCHEMA:
                return {"structured_outputs": {"json": grammar.text}}
            case GrammarKind.CHOICE:
                return {"structured_outputs": {"choice": msgspec.json.decode(grammar.text)}}
        return {"structured_outputs": {grammar.kind.value: grammar.text}}
    schema = '{"type":"object"}' if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    return {"regex": schema} if grammar.kind is GrammarKind.REGEX else {"json_schema": schema}


def choice_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """Return the choice of an event, None if it has none. Raises MalformedAnswer."""
    choices = event.get("choices") or None
    if choices is not None and (not isinstance(choices, list) or len(choices) > 1):
        raise MalformedAnswer("an event has no list of one choice")
    if choices is None or choices == [None]:
        return None
    choice = choices[0]
    if not isinstance(choice, dict):
        raise MalformedAnswer("a choice is not an object")
    return choice


def counts_of(usage: Any) -> tuple[int | None, int | None]:
    """Return the numbers of output tokens and cached prompt tokens, None where not reported."""
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    num_cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return count_of(usage.get("completion_tokens")), count_of(num_cached)


def _logprobs(found: Any) -> list[DeltaLogprob] | None:
    """Parse OpenAI's parallel lists: tokens, their logprobs, and a map of the best alternatives for each."""
    if found is None:
        return []
    try:
        tokens, values = found["tokens"], found["token_logprobs"]
        tops = found.get("top_logprobs") or [None] * len(tokens)
        return [
            DeltaLogprob(_token(token), float(value), _best(top or {}))
            for token, value, top in zip(tokens, values, tops, strict=True)
        ]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _best(top: Mapping[str, float]) -> list[tuple[Token, float]]:
    return sorted(((_token(token), float(value)) for token, value in top.items()), key=lambda one: -one[1])


def _token(spelled: str) -> Token:
    number = spelled.removeprefix(ID_PREFIX)
    return int(number) if number != spelled and number.isdecimal() else spelled
