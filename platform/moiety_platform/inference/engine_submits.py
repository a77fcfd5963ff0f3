"""Converts a generation into engine requests: checks it against the model card and makes one `Submit` per answer.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from moiety_platform.auth.principal import Principal
from moiety_platform.classes.terms import ChosenClass
from moiety_platform.errors import BadRequest, ContextTooLong, prompt_too_long
from moiety_platform.inference.answer_format import AnswerFormat
from moiety_platform.inference.external_model_texts import ExternalModelText
from moiety_platform.inference.generation import Conversation, Generation, PoolingTask
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.option_scores import scored_from
from moiety_platform.inference.prompt_images import image_inputs
from moiety_platform.inference.token_ids import UNKNOWN_TOKEN
from moiety_wire.images import ImageInput
from moiety_wire.messages import ModelCard, Sampling, Stopping, Submit, TokenRules
from moiety_wire.seeds import seed_of_choice


class RequestOrigin(msgspec.Struct, frozen=True):
    """Fields common to all sequences of a request."""

    request_id: str
    model: str  # engine's name of the model
    tenant_id: str
    chosen: ChosenClass
    cache_salt: bytes
    arrival_unix_ns: int
    credit_tokens: int
    weight: float = 1.0
    traceparent: str = ""
    bill: bytes = b""
    gathers: bool = True
    adapter: str = ""  # engine's name of the adapter
    keep_s: float = 0.0  # prefix-cache retention beyond that of the generation


def cache_salt_of(principal: Principal, adapter: str, generation: Generation | None) -> bytes:
    """Return the salt of the request's prefix cache, which the client's own salt separates further."""
    salt = principal.cache_salt + adapter.encode()
    if generation is None or not generation.cache_salt:
        return salt
    return blake2b(salt + b"\0" + generation.cache_salt.encode(errors="replace"), digest_size=32).digest()


def check_limits(generation: Generation, num_sequences: int, card: ModelCard, max_sequences: int) -> None:
    """Check that the model supports the generation, independent of its prompts. Raises BadRequest."""
    if generation.embed:
        _check_pooling(generation, card)
    elif not card.generates:
        raise BadRequest(
            f"the model {card.model!r} is an encoder and generates no text; use it with /v1/embeddings, /v1/score, "
            "/v1/rerank or /v1/classify, or name another model",
            code="generation_not_supported",
            param="model",
        )
    elif generation.option_counts:
        _check_scoring(card)
    elif num_sequences > max_sequences:
        raise BadRequest(
            f"{len(generation.prompts)} prompts × n={generation.num_choices} are {num_sequences} "
            f"sequences; a request may have {max_sequences}. Split it into several",
            param="n",
        )
    if generation.sampling.num_prompt_logprobs is not None and not card.extensible:
        field = "echo" if generation.echo else "prompt_logprobs"
        message = f"the engine of the model {card.model!r} scores no prompts; leave out {field!r}"
        raise BadRequest(message, code="prompt_logprobs_not_supported", param=field)
    for num_logprobs in (generation.sampling.num_logprobs, generation.sampling.num_prompt_logprobs):
        if num_logprobs is not None and num_logprobs > card.max_num_logprobs:
            raise BadRequest(f"this model gives at most {card.max_num_logprobs} alternatives per token; request fewer")
    for name, ids in (
        ("logit_bias", generation.sampling.logit_bias or ()),
        ("stop_token_ids", generation.stop_token_ids),
        ("allowed_token_ids", generation.allowed_ids),
    ):
        if (largest := max(ids, default=0)) >= card.vocab_size:
            message = f"'{name}' has the token id {largest}; the model's are below {card.vocab_size}"
            raise BadRequest(message, code=UNKNOWN_TOKEN, param=name)


def submits_of(
    origin: RequestOrigin,
    generation: Generation,
    prompts: list[list[int]],
    longest: list[int],
    text: ModelText,
    seconds: Sequence[int] = (),
) -> list[Submit]:
    """Return all sequences in the order of their indices.

    `longest` has the maximum number of output tokens for each prompt, `seconds` where the second segment of each pair
    begins.
    """
    num_prompt_tokens, submits = sum(map(len, prompts)), []
    if generation.allowed_ids or generation.bad_words:
        runs = text.runs_of_words(generation.bad_words)
        rules = TokenRules(generation.allowed_ids, runs, generation.bad_words)
        ruled = msgspec.structs.replace(generation.sampling, token_rules=rules)
        generation = msgspec.structs.replace(generation, sampling=ruled)
    for number, (prompt_ids, max_tokens) in enumerate(zip(prompts, longest, strict=True)):
        answer = text.answer_format(generation, number, prompt_ids)
        if generation.shows_special_tokens:
            answer = msgspec.structs.replace(answer, shown_ids=text.special_ids)
        # embeddings and options are answered together, so each input has the SLO of all inputs together
        is_whole = generation.embed or bool(generation.option_counts)
        sibling_tokens = num_prompt_tokens - len(prompt_ids) if is_whole else 0
        prompt = generation.prompts[number]
        images = []
        if text.image_rules is not None and isinstance(prompt, Conversation) and prompt.images:
            images = image_inputs(prompt_ids, prompt.images, text.image_rules)
        made = _submits(origin, generation, number, prompt_ids, max_tokens, answer, sibling_tokens, images)
        if isinstance(text, ExternalModelText):
            made = [text.as_chat(submit, prompt) for submit in made]
        submits += made
    if generation.option_counts:
        are_first = [number == 0 for count in generation.option_counts for number in range(count)]
        return [
            _with_scores_from(submit, first, is_billed=is_first)
            for submit, first, is_first in zip(
                submits, scored_from(prompts, generation.option_counts), are_first, strict=True
            )
        ]
    if seconds:
        return [
            msgspec.structs.replace(submit, second_segment_at=second)
            for submit, second in zip(submits, seconds, strict=True)
        ]
    return submits


def _submits(
    origin: RequestOrigin,
    generation: Generation,
    number: int,
    prompt_ids: list[int],
    max_tokens: int,
    answer: AnswerFormat,
    sibling_tokens: int,
    images: list[ImageInput],
) -> list[Submit]:
    """Return the sequences of one prompt."""
    chosen = origin.chosen
    stopping = Stopping(
        thought=answer.thought if generation.stop else None,
        max_tokens=max_tokens,
        min_tokens=min(generation.min_tokens, max_tokens),
        stop=generation.stop,
        stop_token_ids=generation.stop_token_ids if generation.ignore_eos else _stop_ids(generation, answer),
        ignore_eos=generation.ignore_eos,
        thought_budget=answer.thought_budget,
        includes_stop=generation.includes_stop,
    )
    first = number * generation.num_choices
    submits = [
        Submit(
            request_id=f"{origin.request_id}-{first}",
            seq=0,
            model=origin.model,
            tenant_id=origin.tenant_id,
            service=chosen.service,
            prompt_ids=prompt_ids,
            sampling=generation.sampling,
            stopping=stopping,
            credit_tokens=min(max_tokens, origin.credit_tokens),
            cache_salt=origin.cache_salt,
            arrival_unix_ns=origin.arrival_unix_ns,
            tenant_weight=origin.weight,
            fallback=chosen.fallback,
            traceparent=origin.traceparent,
            billing_context=origin.bill,
            shown_ids=answer.shown_ids,
            marker_ids=answer.marker_ids,
            embed=generation.embed,
            sibling_tokens=sibling_tokens,
            gathers=origin.gathers,
            grammar=answer.grammar,
            adapter=origin.adapter,
            keep_s=max(generation.keep_s, origin.keep_s),
            images=images,
        )
    ]
    for choice in range(1, generation.num_choices):
        submits.append(
            msgspec.structs.replace(
                submits[0],
                request_id=f"{origin.request_id}-{first + choice}",
                sampling=_sampling_of(generation.sampling, choice),
            )
        )
    return submits


def _stop_ids(generation: Generation, answer: AnswerFormat) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*generation.stop_token_ids, *answer.stop_token_ids)))


def _sampling_of(sampling: Sampling, choice: int) -> Sampling:
    """Return the sampling of a further choice.

    Only the first choice has the request's own seed and scores the prompt.
    """
    return msgspec.structs.replace(sampling, seed=seed_of_choice(sampling.seed, choice), num_prompt_logprobs=None)


def _with_scores_from(submit: Submit, first: int, *, is_billed: bool) -> Submit:
    """Return the sequence of an option, whose prompt is scored from the token `first` on.

    The engine meters only the first option of a question: `billed_prompt_tokens` has what the others add.
    """
    sampling = msgspec.structs.replace(submit.sampling, prompt_logprobs_from=first)
    bill = submit.billing_context if is_billed else b""
    return msgspec.structs.replace(submit, sampling=sampling, billing_context=bill)


def _check_scoring(card: ModelCard) -> None:
    """Check that the engine can score options. Raises BadRequest."""
    if not card.extensible:
        raise BadRequest(
            f"the engine of the model {card.model!r} is external and cannot score prompts; use a model of a Moiety "
            "engine, or send a chat with a JSON schema of the choices in 'response_format'",
            code="decisions_not_supported",
            param="model",
        )


def _check_pooling(generation: Generation, card: ModelCard) -> None:
    """Check that the model can do the task: a score needs a head with one label, or embeddings."""
    match generation.task:
        case PoolingTask.EMBED:
            _check_embedding(generation, card)
            _check_numbers(generation, generation.dimensions or card.embedding_width)
        case PoolingTask.CLASSIFY if not card.labels:
            message = f"the model {card.model!r} has no classification head; use another model"
            raise BadRequest(message, code="classification_not_supported", param="model")
        case PoolingTask.SCORE if len(card.labels) != 1 and not card.embedding_width:
            raise BadRequest(
                f"the model {card.model!r} cannot score texts; use a cross-encoder with one label or an embedding "
                "model",
                code="score_not_supported",
                param="model",
            )
        case PoolingTask.SCORE | PoolingTask.CLASSIFY:
            _check_numbers(generation, len(card.labels) or card.embedding_width)


def _check_embedding(generation: Generation, card: ModelCard) -> None:
    width = card.embedding_width
    if not width:
        raise BadRequest(
            f"the engine of the model {card.model!r} does not support embeddings; use another model",
            code="embeddings_not_supported",
            param="model",
        )
    if generation.dimensions is not None and generation.dimensions > width:
        raise BadRequest(
            f"'dimensions' is {generation.dimensions}, but the vectors of {card.model!r} have {width} numbers; request "
            "at most as many",
            param="dimensions",
        )


def _check_numbers(generation: Generation, width: int) -> None:
    """Check the numbers of all results, which the gateway holds until the last one has come. Raises BadRequest."""
    numbers = width * len(generation.prompts)
    if generation.max_numbers is not None and numbers > generation.max_numbers:
        more = ", or ask for fewer 'dimensions' or for 'base64'" if generation.task is PoolingTask.EMBED else ""
        raise BadRequest(
            f"the results of {len(generation.prompts):,} inputs have {numbers:,} numbers, more than "
            f"{generation.max_numbers:,}; send fewer inputs in one request{more}",
            code="answer_too_large",
            param=generation.prompt_field,
        )


def most_output_tokens(generation: Generation, card: ModelCard, num_prompt_tokens: int, *, clamps: bool = False) -> int:
    """Return the maximum number of output tokens for the prompt.

    With `clamps` a requested number is lowered to what the context leaves. Raises ContextTooLong, which names both
    lengths.
    """
    left = card.max_context_tokens - num_prompt_tokens
    if generation.embed and left < 0:
        raise ContextTooLong(
            f"This model's maximum context length is {card.max_context_tokens} tokens, and an input has "
            f"{num_prompt_tokens}. Split it into shorter ones",
            param=generation.prompt_field,
        )
    if (generation.max_tokens is None or clamps) and left < 1 and not generation.embed:
        raise prompt_too_long(str(num_prompt_tokens), card.max_context_tokens - 1, card.max_context_tokens)
    most = left if card.max_output_tokens is None else min(left, card.max_output_tokens)
    default = most if generation.default_max_tokens is None else min(most, generation.default_max_tokens)
    wanted = default if generation.max_tokens is None else generation.max_tokens
    if clamps:
        return min(wanted, most)
    if wanted > left:
        raise ContextTooLong(
            f"This model's maximum context length is {card.max_context_tokens} tokens. The prompt has "
            f"{num_prompt_tokens} tokens and {wanted} are asked for, together {num_prompt_tokens + wanted}. Shorten "
            f"the prompt or lower {generation.max_tokens_field}"
        )
    if wanted > most:
        field = generation.max_tokens_field
        raise BadRequest(f"{field!r} is {wanted}; the model generates at most {most} tokens. Lower it", param=field)
    return wanted
