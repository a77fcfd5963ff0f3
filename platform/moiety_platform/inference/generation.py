"""Internal representation of an inference request, independent of any API's fields.

The schemas of the APIs create it and the pipeline runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from moiety_platform.inference.context_edits import ContextEdit
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import Sampling

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # see ModelCard.sampling_defaults


class ReasoningFields(msgspec.Struct, frozen=True):
    """Names of an API's fields for reasoning, as its answers' headers name them."""

    effort: str = "reasoning_effort"
    switch: str = "chat_template_kwargs"
    budget: str = "thinking_token_budget"


class PromptImage(msgspec.Struct, frozen=True):
    """Image of a conversation: an encoded file, the link at which it must be fetched, or an uploaded file's id.

    `digest` and `encoded` take long to compute, so they are computed once for all choices of a request.
    """

    data: bytes = b""
    source: str = ""  # the link or the id; "" where `data` is known
    is_uploaded: bool = False  # whether `source` is the id of a file
    path: str = ""  # of its part in the request
    digest: bytes = b""  # `image_digest` of the file; b"" where it is not computed
    encoded: bytes = b""  # the file's data URL as JSON; b"" where it is not computed


class PromptDocument(msgspec.Struct, frozen=True):
    """Document of a conversation, whose text is not read yet: a file, an uploaded file's id, or a link."""

    data: bytes = b""
    file_id: str = ""  # of an upload
    link: str = ""
    title: str | None = None
    context: str | None = None  # the client's text about the document
    may_be_image: bool = False  # whether an uploaded image is accepted in its place
    path: str = ""  # of its part in the request


class Conversation(msgspec.Struct, frozen=True):
    """Messages for the model's chat template, each with `role` and text `content`.

    An assistant's message may have `reasoning_content`, its reasoning, and `tool_calls`, each an `id` and a `function`
    with `name` and `arguments` (an object). A tool's message has the `tool_call_id`.

    The answer begins with `prefill`, and only the rest of it is generated. It may call the tools in `tools`. `images`
    are those of the messages, in their order. `documents` are those that are not read yet; none are left in a prompt.
    """

    messages: tuple[dict[str, Any], ...]
    prefill: str = ""
    tools: ToolOffer | None = None
    thinks: bool | None = None  # whether the model reasons before it answers; None: the template's default
    effort: str | None = None  # level of `moiety_text.efforts`; "none": no reasoning
    template_options: dict[str, Any] = {}  # further variables of the chat template, as named by the client
    thought_budget: int | None = None  # reasoning tokens, after which the engine ends the reasoning
    reasoning_fields: ReasoningFields = ReasoningFields()
    images: tuple[PromptImage, ...] = ()
    documents: tuple[PromptDocument, ...] = ()
    has_reasoning_options: bool = False  # whether the template's variables depend on the request; is computed

    def __post_init__(self) -> None:
        images: list[PromptImage] = []
        documents: list[PromptDocument] = []
        for message in self.messages:
            if isinstance(content := message["content"], list):
                images += [part["image"] for part in content if part["type"] == "image"]
                documents += [part["document"] for part in content if part["type"] == "document"]
        msgspec.structs.force_setattr(self, "images", tuple(images))
        msgspec.structs.force_setattr(self, "documents", tuple(documents))
        chosen = (self.thinks, self.effort, self.thought_budget)
        depends = bool(self.template_options) or chosen != (None, None, None)
        msgspec.structs.force_setattr(self, "has_reasoning_options", depends)


class TextPair(msgspec.Struct, frozen=True):
    """Two texts whose relation is scored."""

    first: str
    second: str


Prompt = Conversation | str | tuple[int, ...] | TextPair


class PoolingTask(StrEnum):
    """Purpose of a generation with `embed`."""

    EMBED = "embed"
    SCORE = "score"  # the prompts are pairs
    CLASSIFY = "classify"


class Generation(msgspec.Struct, frozen=True):
    """A generation of `num_choices` answers to each prompt. Choice i of prompt p has index p · num_choices + i.

    `max_tokens` None means `default_max_tokens`, or fewer if the model's context leaves fewer. 0 means that nothing is
    generated: see `embed`.
    """

    model: str
    prompts: tuple[Prompt, ...]
    num_choices: int
    sampling: Sampling
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"  # the API's field of it
    clamps_max_tokens: bool = False  # whether it is lowered to what the context leaves, otherwise it is refused
    default_max_tokens: int | None = None  # without `max_tokens`; None: the rest of the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    service_tier: str | None = None  # OpenAI's name of the requested service class
    embed: bool = False  # return each prompt's vector and no tokens: `max_tokens` is 0
    task: PoolingTask = PoolingTask.EMBED  # with `embed`
    truncate_tokens: int | None = None  # most tokens of a prompt; -1: as many as the model's context leaves
    truncates_left: bool = False  # with `truncate_tokens`: the first tokens are cut off, not the last
    adds_special_tokens: bool = True  # of the tokenizer to a prompt of text
    dimensions: int | None = None  # numbers per returned vector; None for all
    max_numbers: int | None = None  # limit on the numbers of all results together; None for no limit
    grammar: GrammarSpec | None = None  # grammar of each answer
    allowed_ids: tuple[int, ...] = ()  # the only tokens of answers; empty: all
    bad_words: tuple[str, ...] = ()  # that answers must not have
    includes_stop: bool = False  # the text ends with what has stopped it
    keep_s: float = 0.0  # prefix-cache retention of the conversation
    echo: bool = False  # return each prompt's text before its answers
    shows_special_tokens: bool = False  # the text of special tokens is a part of the answer
    cache_salt: str = ""  # the client's own: requests share cached prefixes only with those of the same salt
    truncates: bool = False  # leave out the oldest messages of a conversation that does not fit the context
    context_edits: tuple[ContextEdit, ...] = ()  # of the only prompt, a conversation, in their order
    option_counts: tuple[
        int, ...
    ] = ()  # consecutive prompts that are the options of one question, whose ends are scored
    prompt_field: str = "prompt"  # the API's field of the prompts, for error messages
    unset_sampling: tuple[str, ...] = ()  # fields of `sampling` that the request left out: the model's defaults apply

    @property
    def has_documents(self) -> bool:
        """Return whether the only prompt is a conversation with documents."""
        prompt = self.prompts[0]
        return isinstance(prompt, Conversation) and bool(prompt.documents)


def unset_fields(body: object) -> tuple[str, ...]:
    """Return the sampling parameters that a request's body does not set, or has no fields for."""
    unset = []
    for name in _DEFAULTED:  # of each request, and a generator would cost more calls
        if getattr(body, name, None) is None:
            unset.append(name)  # noqa: PERF401
    return tuple(unset)


def with_sampling_defaults(generation: Generation, defaults: Mapping[str, float]) -> Generation:
    """Return the generation with the model's default for each sampling parameter that the request left out."""
    found = {name: defaults[name] for name in generation.unset_sampling if name in defaults}
    if not found:
        return generation
    return msgspec.structs.replace(generation, sampling=msgspec.structs.replace(generation.sampling, **found))


def with_single_texts(generation: Generation) -> Generation:
    """Return a generation of pairs as one of its distinct texts, for a model that embeds each text by itself."""
    texts = dict.fromkeys(
        text for pair in generation.prompts if isinstance(pair, TextPair) for text in (pair.first, pair.second)
    )
    return msgspec.structs.replace(generation, prompts=tuple(texts))
