"""Validation of a Submit against the model, and its conversion for the core. Without side effects."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from moiety_engine.messages import CoreSubmit
from moiety_engine.server.image_validation import images_complaint
from moiety_wire.classes import ServiceClass
from moiety_wire.grammars import MAX_GRAMMAR_BYTES
from moiety_wire.images import ImageRules
from moiety_wire.messages import (
    FailureCode,
    ModelCard,
    Sampling,
    SpeculativePrefillRequest,
    Stopping,
    Submit,
)
from moiety_wire.shared_fields import copy_fields
from moiety_wire.thought_budget import MIN_THOUGHT_BUDGET, ThoughtBudget

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096
MAX_BUDGET_IDS = 1024  # token ids in a thought budget
MIN_CHANNEL_OPENER = 3  # a channel's token, its name, and the end of a header
MAX_PENALTY = 1000.0
MIN_REPETITION_PENALTY = 1 / MAX_PENALTY  # logits are divided by the penalty
MAX_BIAS = 1e30  # multiplied by a penalty and divided by the least temperature, still finite in float32
MAX_RULE_IDS = 4096
MAX_CLASS_NAME_LENGTH = 64  # the name is a label of the engine's counters
MAX_KEEP_S = 7 * 86_400.0
TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class ModelLimits:
    model: str
    max_context_tokens: int
    vocab_size: int
    max_num_logprobs: int
    eos_token_ids: tuple[int, ...]
    makes_embeddings: bool
    follows_grammars: bool = False
    hands_over: bool = False
    takes_over: bool = False
    speculative_prefill: bool = False
    images: ImageRules | None = None
    generates: bool = True

    @classmethod
    def of(cls, card: ModelCard) -> ModelLimits:
        return copy_fields(
            card,
            cls,
            makes_embeddings=card.embedding_width > 0 or bool(card.labels),
            takes_over=bool(card.kv_address),
        )


@dataclass(frozen=True)
class Refusal:
    code: FailureCode
    message: str


def find_refusal(submit: Submit, limits: ModelLimits) -> Refusal | None:
    """Return why this request cannot be served; None if it can."""
    if submit.model != limits.model:
        return Refusal(FailureCode.UNKNOWN_MODEL, f"this engine serves {limits.model!r}, not {submit.model!r}")
    num_prompt = len(submit.prompt_ids)
    if num_prompt + (0 if submit.embed else 1) > limits.max_context_tokens:
        message = (
            f"the prompt has {num_prompt} tokens, but the context of {limits.model!r} is {limits.max_context_tokens} "
            "tokens for prompt and output together; shorten the prompt"
        )
        return Refusal(FailureCode.CONTEXT_LENGTH_EXCEEDED, message)
    complaint = (
        _prompt_complaint(submit, limits)
        or _resumed_complaint(submit, limits)
        or _shown_complaint(submit, limits)
        or _service_complaint(submit)
        or _sampling_complaint(submit.sampling, limits)
        or _rules_complaint(submit, limits)
        or _length_complaint(submit, limits)
        or _stopping_complaint(submit.stopping, limits)
        or _grammar_complaint(submit, limits)
        or _transfer_complaint(submit, limits)
        or _keep_complaint(submit)
        or images_complaint(submit, limits.images)
        or _segment_complaint(submit)
    )
    return Refusal(FailureCode.INVALID_REQUEST, complaint) if complaint else None


def to_core(submit: Submit, limits: ModelLimits, key: int) -> CoreSubmit:
    """Return a validated request for the core, with its length clipped to the context."""
    stopping = submit.stopping
    return copy_fields(
        submit,
        CoreSubmit,
        key=key,
        max_tokens=min(stopping.max_tokens, limits.max_context_tokens - len(submit.prompt_ids)),
        min_tokens=stopping.min_tokens,
        stop_token_ids=sorted(stop_ids_of(stopping, limits)),
        thought_budget=stopping.thought_budget,
        images=(),  # they are decoded first
        images_pending=False,
    )


def stop_ids_of(stopping: Stopping, limits: ModelLimits) -> set[int]:
    """Return the tokens that end the output."""
    return {*stopping.stop_token_ids, *(() if stopping.ignore_eos else limits.eos_token_ids)}


def _prompt_complaint(submit: Submit, limits: ModelLimits) -> str:
    ids = submit.prompt_ids
    if not ids:
        return "the prompt has no tokens; send at least one"
    if complaint := _vocabulary_complaint("a prompt token id", ids, limits):
        return complaint
    if submit.credit_tokens < 0:
        return f"credit_tokens must be 0 or more, not {submit.credit_tokens}"
    if submit.sibling_tokens < 0:
        return f"sibling_tokens must be 0 or more, not {submit.sibling_tokens}"
    if not (math.isfinite(submit.tenant_weight) and submit.tenant_weight > 0):
        return f"tenant_weight must be above 0, not {submit.tenant_weight}"
    return ""


def _resumed_complaint(submit: Submit, limits: ModelLimits) -> str:
    ids = submit.resumed_ids
    if not ids:
        return ""
    if complaint := _vocabulary_complaint("a resumed token id", ids, limits):
        return complaint
    longest = min(submit.stopping.max_tokens, limits.max_context_tokens - len(submit.prompt_ids))
    if len(ids) > longest:
        return f"{len(ids)} output tokens cannot be resumed: this engine allows at most {longest} output tokens"
    return ""


def _shown_complaint(submit: Submit, limits: ModelLimits) -> str:
    return _vocabulary_complaint("a token id in shown_ids", submit.shown_ids, limits)


def _vocabulary_complaint(what: str, ids: Collection[int], limits: ModelLimits) -> str:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        return f"{what} is outside the model's vocabulary, 0 to {limits.vocab_size - 1}"
    return ""


def _service_complaint(submit: Submit) -> str:
    for field, service in (("service", submit.service), ("fallback", submit.fallback)):
        complaint = "" if service is None else _class_complaint(service)
        if complaint:
            return f"{field}: {complaint}"
    return ""


def _class_complaint(service: ServiceClass) -> str:
    if not 0 < len(service.name) <= MAX_CLASS_NAME_LENGTH:
        return f"a class's name must have 1 to {MAX_CLASS_NAME_LENGTH} characters, not {len(service.name)}"
    return service.complaint()


def _sampling_complaint(sampling: Sampling, limits: ModelLimits) -> str:
    ranges = (
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_PENALTY),
        ("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # NaN is in no range
            return f"{name} must be between {low:g} and {high:g}, not {value}"
    if sampling.top_k < 0:
        return f"top_k must be 0 (off) or more, not {sampling.top_k}"
    for name, count in (
        ("num_logprobs", sampling.num_logprobs),
        ("num_prompt_logprobs", sampling.num_prompt_logprobs),
    ):
        if count is not None and not 0 <= count <= limits.max_num_logprobs:
            return f"{name} must be between 0 and {limits.max_num_logprobs}, not {count}"
    if sampling.prompt_logprobs_from < 1:  # the first token has no predecessor
        return f"prompt_logprobs_from must be at least 1, not {sampling.prompt_logprobs_from}"
    return _bias_complaint(sampling, limits)


def _bias_complaint(sampling: Sampling, limits: ModelLimits) -> str:
    biases = sampling.logit_bias or {}
    if complaint := _vocabulary_complaint("a logit_bias token id", biases, limits):
        return complaint
    for bias in biases.values():
        if not -MAX_BIAS <= bias <= MAX_BIAS:  # NaN is in no range
            return f"a logit_bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {bias}"
    return ""


def _rules_complaint(submit: Submit, limits: ModelLimits) -> str:
    rules = submit.sampling.token_rules
    if rules is None:
        return ""
    run_ids = [token_id for run in rules.banned_runs for token_id in run]
    if len(rules.allowed_ids) > MAX_RULE_IDS or len(run_ids) > MAX_RULE_IDS:
        return f"token_rules may have {MAX_RULE_IDS:,} allowed ids, and as many ids in banned runs"
    if not all(rules.banned_runs):
        return "a banned run has no tokens; leave it out"
    if complaint := _vocabulary_complaint("a token id in token_rules", (*rules.allowed_ids, *run_ids), limits):
        return complaint
    if (
        submit.stopping.min_tokens
        and rules.allowed_ids
        and stop_ids_of(submit.stopping, limits) >= {*rules.allowed_ids}
    ):
        return (
            "all allowed tokens end the output, which min_tokens forbids; allow another token, or leave min_tokens out"
        )
    return ""


def _length_complaint(submit: Submit, limits: ModelLimits) -> str:
    max_tokens = submit.stopping.max_tokens
    if submit.speculative_prefill is not None:
        return _speculative_prefill_error(submit, submit.speculative_prefill, limits)
    if not submit.embed and not limits.generates:
        return "an encoder generates no text; send the request to an engine with a generating model"
    if not submit.embed:
        return "" if max_tokens >= 1 else f"max_tokens must be at least 1, not {max_tokens}"
    if not limits.makes_embeddings:
        return "embeddings are not available on this engine; send the request to an engine that supports them"
    return f"an embedding generates no tokens: max_tokens must be 0, not {max_tokens}" if max_tokens else ""


def _speculative_prefill_error(submit: Submit, seen: SpeculativePrefillRequest, limits: ModelLimits) -> str:
    if not limits.speculative_prefill:
        return (
            "speculative prefill is not available on this engine; send speculative_prefill only to an "
            "engine whose model card has it"
        )
    if submit.embed or submit.stopping.max_tokens:
        return "a speculative prefill generates nothing: leave embed out, and set max_tokens to 0"
    if (
        submit.resumed_ids
        or submit.grammar
        or submit.hand_over
        or submit.transfer_id
        or submit.adapter
        or submit.images
    ):
        return (
            "a speculative prefill is only a prompt of text: leave out resumed_ids, grammar, hand_over, transfer_id, "
            "adapter, images"
        )
    ids = seen.other_ids
    if not 0 <= seen.num_shared <= len(submit.prompt_ids) or not 0 <= seen.num_asked <= seen.num_shared + len(ids):
        return (
            "num_shared must be at most the number of prompt tokens, and num_asked at most the number of "
            "tokens of the request before"
        )
    if len(ids) > limits.max_context_tokens or (ids and (min(ids) < 0 or max(ids) >= limits.vocab_size)):
        return (
            f"other_ids must be token ids of the model's vocabulary, 0 to {limits.vocab_size - 1}, and at "
            "most as many as the context length"
        )
    return ""


def _grammar_complaint(submit: Submit, limits: ModelLimits) -> str:
    if submit.grammar is None:
        return ""
    if not limits.follows_grammars:
        return (
            "structured outputs are not available on this engine; send the request to another engine, or "
            "leave the grammar out"
        )
    if submit.embed:
        return "an embedding generates no tokens: leave the grammar out"
    if submit.stopping.ignore_eos:
        return "a grammar decides where the output ends: leave ignore_eos out"
    if len(submit.grammar.text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        return f"the grammar has more than {MAX_GRAMMAR_BYTES:,} bytes; make it shorter"
    return ""


def _keep_complaint(submit: Submit) -> str:
    if not 0 <= submit.keep_s <= MAX_KEEP_S:
        return f"keep_s must be between 0 and {MAX_KEEP_S:.0f} seconds"
    return ""


def _segment_complaint(submit: Submit) -> str:
    second, num_prompt = submit.second_segment_at, len(submit.prompt_ids)
    if 0 <= second < num_prompt:
        return ""
    return f"second_segment_at must be an index of the prompt's {num_prompt} tokens, not {second}"


def _transfer_complaint(submit: Submit, limits: ModelLimits) -> str:
    if submit.hand_over is not None:
        if not limits.hands_over:
            return (
                "disaggregated prefill is not available on this engine; send hand_over only to an engine "
                "whose model card has it"
            )
        if submit.sampling.num_prompt_logprobs is not None:
            return "hand_over is not available with prompt log-probabilities; leave it out"
        if not TRANSFER_ID.fullmatch(submit.hand_over.transfer_id):
            return "transfer_id must have 32 hexadecimal digits"
    if submit.transfer_id and not limits.takes_over:
        return "this engine does not receive KV; send transfer_id only to an engine whose model card has a kv_address"
    if submit.transfer_id and not submit.resumed_ids:
        return "a request with transfer_id needs at least one output token: send resumed_ids"
    return ""


def _stopping_complaint(stopping: Stopping, limits: ModelLimits) -> str:
    if not 0 <= stopping.min_tokens <= stopping.max_tokens:
        return f"min_tokens must be between 0 and max_tokens ({stopping.max_tokens}), not {stopping.min_tokens}"
    if len(stopping.stop) > MAX_STOP_STRINGS:
        return f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(stopping.stop)}"
    if any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stopping.stop):
        return f"a stop string must have 1 to {MAX_STOP_LENGTH} characters"
    if complaint := _vocabulary_complaint("a stop token id", stopping.stop_token_ids, limits):
        return complaint
    marks = () if stopping.thought is None else (stopping.thought.opener, stopping.thought.closer)
    if any(not 0 < len(mark) <= MAX_STOP_LENGTH for mark in marks):
        return f"a reasoning marker must have 1 to {MAX_STOP_LENGTH} characters"
    return "" if stopping.thought_budget is None else _budget_complaint(stopping.thought_budget, limits)


def _budget_complaint(budget: ThoughtBudget, limits: ModelLimits) -> str:
    if budget.max_tokens < MIN_THOUGHT_BUDGET:
        return f"a thought budget must have at least {MIN_THOUGHT_BUDGET} tokens, not {budget.max_tokens}"
    ids = (*budget.opener_ids, *budget.closer_ids, *budget.closing_ids, *budget.space_ids, *budget.reopener_ids)
    if len(ids) > MAX_BUDGET_IDS or not budget.closer_ids or not budget.closing_ids:
        return f"a thought budget needs closer_ids and closing_ids, and at most {MAX_BUDGET_IDS} ids in all"
    if complaint := _vocabulary_complaint("a token id of the thought budget", ids, limits):
        return complaint
    if budget.reopener_ids and len(budget.opener_ids) < MIN_CHANNEL_OPENER:
        return f"a thought budget with reopener_ids needs at least {MIN_CHANNEL_OPENER} opener_ids"
    return ""
