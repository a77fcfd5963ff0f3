"""llama.cpp's native `/completion`. Its `/v1/completions` reports the number of tokens only at the end."""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.errors import PlatformError
from moiety_platform.external_engines.dialect import (
    AnswerDelta,
    MalformedAnswer,
    are_ids,
    count_of,
    form_refusal,
    rule_refusals,
    sent_stops,
)
from moiety_platform.external_engines.failures import error_of_event
from moiety_wire.grammars import GrammarKind
from moiety_wire.messages import FinishReason, Submit

_FORMS = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA})
FINISH = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}
SEEDS = 2**32 - 1  # the largest value means a random seed
LAST_FIELDS = ["content", "tokens_predicted", "stop", "stop_type", "stopping_word", "timings"]  # excludes the prompt


class LlamaCpp:
    """Dialect of llama.cpp's server.

    Implements Dialect. Its prompt cache has no tenants, so it is disabled unless `shared_cache` allows it.
    """

    path = "/completion"
    max_num_logprobs = 0
    keeps_alive = False  # the server announces this in its answer and closes

    def __init__(self, address: ExternalAddress) -> None:
        self._cache_prompt = address.shared_cache

    def refusal(self, submit: Submit) -> str:
        asked = {
            "logprobs": submit.sampling.num_logprobs is not None,
            "min_tokens": submit.stopping.min_tokens != 0,
            "stop_token_ids": bool(submit.stopping.stop_token_ids),
            "tools or special tokens in the text": bool(submit.shown_ids),
        }
        missing = [name for name, is_asked in asked.items() if is_asked]
        return ", ".join(filter(None, [*missing, *rule_refusals(submit), form_refusal(submit, _FORMS)]))

    def body(self, submit: Submit, prompt_ids: list[int], max_tokens: int, min_tokens: int) -> dict[str, Any]:
        sampling, stopping = submit.sampling, submit.stopping
        body: dict[str, Any] = {
            "prompt": prompt_ids,
            "n_predict": max_tokens,
            "stream": True,
            "return_tokens": True,
            "response_fields": LAST_FIELDS,
            "cache_prompt": self._cache_prompt,
            "temperature": sampling.temperature if sampling.top_p else 0.0,
            "top_p": sampling.top_p or 1.0,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": len(prompt_ids) + max_tokens,  # the whole context
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": [[token_id, bias] for token_id, bias in (sampling.logit_bias or {}).items()],
            "stop": sent_stops(stopping),
            "ignore_eos": stopping.ignore_eos,
        }
        if submit.grammar is not None:
            body["json_schema"] = msgspec.json.decode(submit.grammar.text or '{"type":"object"}')
        if sampling.seed is not None:
            body["seed"] = sampling.seed % SEEDS
        return body

    def read(self, event: dict[str, Any]) -> AnswerDelta | PlatformError:
        error = event.get("error")
        if error is not None:
            return error_of_event(error)
        text, num_output = event.get("content"), count_of(event.get("tokens_predicted"))
        if event.get("stop") is not True:
            if not isinstance(text, str):
                raise MalformedAnswer("an event lacks content")
            token_ids = event.get("tokens")
            if not token_ids or not are_ids(token_ids):
                token_ids = None
            return AnswerDelta(text=text, token_ids=token_ids, num_output_tokens=num_output)
        stop_type = event.get("stop_type")
        stopped = event.get("stopping_word") if stop_type == "word" else None
        timings = event.get("timings")
        num_cached = timings.get("cache_n") if isinstance(timings, dict) else None
        return AnswerDelta(
            text=text if isinstance(text, str) else "",
            num_output_tokens=num_output,
            num_cached_tokens=count_of(num_cached),
            finish=FINISH.get(stop_type) if isinstance(stop_type, str) else None,
            stop_string=stopped if isinstance(stopped, str) and stopped else None,
            is_last=True,
        )
