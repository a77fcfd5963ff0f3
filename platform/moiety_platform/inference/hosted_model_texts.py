"""Text of a model of a hosted provider, whose tokenizer and chat template are not known.

A conversation is sent as it is. Its tokens are estimated in two ways: `encode_prompts` returns as many placeholders as
are likely, for the context and until the provider has counted; `most_prompt_tokens` is reserved under the quotas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.errors import BadRequest
from moiety_platform.external_engines.anthropic_request import thinking_tokens
from moiety_platform.external_engines.hosted_provider import estimated_tokens
from moiety_platform.inference.chat_fields import chat_messages, chat_options
from moiety_platform.inference.custom_tools import text_format_of
from moiety_platform.inference.external_model_texts import ExternalModelText
from moiety_platform.inference.generation import Conversation, Generation, Prompt
from moiety_platform.inference.prompt_images import check_file, check_together, images_not_supported, invalid_image
from moiety_platform.inference.system_messages import as_user_messages
from moiety_platform.inference.template_options import TEXT_OPTIONS, unread_option
from moiety_text.efforts import NO_EFFORT
from moiety_text.reasoning import SWITCHES
from moiety_text.segment_cache import NO_SCOPE, Scope
from moiety_wire.images import ImageAllowance
from moiety_wire.messages import ModelCard, Submit

MESSAGE_TOKENS = 16  # reserved for what a provider writes around a message
TOOLS_TOKENS = 1024  # reserved for what a provider writes around tools
COMPLETIONS_NOT_SUPPORTED = "completions_not_supported"
EFFORT_TOKENS = (("low", 2048), ("medium", 8192))  # budgets of reasoning up to which an effort is the nearest
_ANTHROPIC = "hosted-anthropic"


class HostedModelText(ExternalModelText):
    """Text of one model of a hosted provider. Thread-safe."""

    def __init__(self, card: ModelCard, inline_bytes: int) -> None:
        super().__init__(card, card.image_allowance or ImageAllowance(image_tokens=0), inline_bytes)
        self._takes_images = card.image_allowance is not None
        self._is_anthropic = card.family == _ANTHROPIC
        self.estimate = self.most_prompt_tokens

    async def encode(
        self,
        prompts: Sequence[Prompt],
        field: str = "prompt",
        *,
        adds_special_tokens: bool = True,
        scope: Scope = NO_SCOPE,
    ) -> list[list[int]]:
        """Refuse: only the provider can count the tokens. Raises BadRequest."""
        raise BadRequest(
            f"the tokenizer of the model {self._model!r} is its provider's, so tokens cannot be counted here; read "
            "the usage of an answer instead",
            code="tokens_not_countable",
            param="model",
        )

    async def encode_whole(self, conversation: Conversation, scope: Scope = NO_SCOPE) -> list[int]:
        """Return as many placeholders as the conversation is likely to have tokens. Raises BadRequest."""
        return [0] * self._likely_tokens(conversation)

    async def encode_prompts(self, generation: Generation, tenant_id: str = "") -> list[list[int]]:
        """Return placeholders for the likely tokens of each prompt. Raises BadRequest for prompts without messages."""
        return [[0] * self._likely_tokens(self._conversation_of(prompt)) for prompt in generation.prompts]

    def most_prompt_tokens(self, generation: Generation) -> int:
        """Return an upper estimate of the tokens of all prompts.

        One for each byte of UTF-8, and for each image its allowance.
        """
        total = 0
        for prompt in generation.prompts:
            conversation = self._conversation_of(prompt)
            total += _num_bytes(conversation) + MESSAGE_TOKENS * (1 + len(conversation.messages))
            total += self._allowance.image_tokens * len(conversation.images)
            total += 0 if conversation.tools is None else TOOLS_TOKENS
        return total

    def adjusted_fields(self, generation: Generation) -> dict[str, str]:
        prompt = generation.prompts[0]
        if not isinstance(prompt, Conversation):
            return {}
        tools = () if prompt.tools is None else prompt.tools.tools
        free_inputs = {text_format_of(tool): "text" for tool in tools if tool.input_grammar is not None}
        unread = {name for name in prompt.template_options if name not in SWITCHES}
        options = {name: value for one in sorted(unread) for name, value in unread_option(one).items()}
        return {**self._adjusted_reasoning(_by_effort(prompt), generation), **free_inputs, **options}

    def _adjusted_reasoning(self, prompt: Conversation, generation: Generation) -> dict[str, str]:
        fields = prompt.reasoning_fields
        if self._is_anthropic:
            asked = self._reasoning_of(prompt)
            if not asked or thinking_tokens(asked, generation.max_tokens, prompt.messages) is not None:
                return {}
            return {fields.effort if prompt.thought_budget is None else fields.budget: NO_EFFORT}
        if prompt.thought_budget is None or prompt.effort is not None:
            return {}
        return {fields.budget: _effort_of(prompt.thought_budget)}

    def as_chat(self, submit: Submit, prompt: Prompt) -> Submit:
        """Return the request with its conversation."""
        prompt = self._conversation_of(prompt)
        if self._is_anthropic:
            prompt = msgspec.structs.replace(prompt, messages=tuple(as_user_messages(prompt.messages)))
        messages = chat_messages(prompt)
        if prompt.prefill:
            messages = (*messages, {"role": "assistant", "content": prompt.prefill})
        options = {**chat_options(prompt, {}), **self._reasoning_of(prompt)}
        fields = {name: getattr(submit, name) for name in submit.__struct_fields__}
        return ChatSubmit(**fields, messages=messages, options=options, is_hosted=True)

    def _reasoning_of(self, prompt: Conversation) -> dict[str, Any]:
        """Return the reasoning that the request asks for, as an effort or, with Anthropic's API, also as a budget."""
        effort = prompt.effort
        if not self._is_anthropic:
            if effort is None and prompt.thought_budget is not None:
                effort = _effort_of(prompt.thought_budget)
            return {} if effort is None else {"reasoning_effort": effort}
        if prompt.thinks is False or effort == NO_EFFORT:
            return {}
        asked: dict[str, Any] = {"reasoning_effort": effort or ("medium" if prompt.thinks else None)}
        asked["thinking_budget"] = prompt.thought_budget
        return {name: value for name, value in asked.items() if value is not None}

    def _is_sent_as_chat(self, prompt: Prompt) -> bool:
        return isinstance(prompt, Conversation)

    def _conversation_of(self, prompt: Prompt) -> Conversation:
        """Return the prompt, if the provider can get it. Raises BadRequest."""
        if not isinstance(prompt, Conversation):
            raise BadRequest(
                f"the provider of the model {self._model!r} takes conversations, and no prompts of text or token ids; "
                "use /v1/chat/completions, /v1/messages or /v1/responses",
                code=COMPLETIONS_NOT_SUPPORTED,
                param="prompt",
            )
        if not prompt.template_options.keys().isdisjoint(TEXT_OPTIONS):
            raise BadRequest(
                f"the provider of the model {self._model!r} reads no 'documents'; put their text into a message",
                param="documents",
            )
        if prompt.images and not self._takes_images:
            raise images_not_supported(self._model, prompt.images[0])
        return _by_effort(prompt) if prompt.template_options else prompt

    def _likely_tokens(self, conversation: Conversation) -> int:
        """Return the likely number of tokens of a conversation, at least one. Raises BadRequest for its images."""
        images = conversation.images
        if images:
            check_together(images, self._allowance)
            for number, image in enumerate(images):
                try:
                    check_file(image.data, self._allowance)
                except ValueError as exc:
                    raise invalid_image(f"image {number} cannot be read: {exc}", image) from exc
        return max(1, estimated_tokens(_num_bytes(conversation)) + self._allowance.image_tokens * len(images))


def _by_effort(prompt: Conversation) -> Conversation:
    """Return the conversation with the switches of chat templates as an effort, without other template options."""
    switches = [prompt.template_options.get(name) for name in SWITCHES]
    effort, thinks = prompt.effort, prompt.thinks
    if False in switches:  # options by name override an effort, as for templates
        effort, thinks = NO_EFFORT, None
    elif True in switches:
        effort, thinks = None if effort == NO_EFFORT else effort, True
    return msgspec.structs.replace(prompt, effort=effort, thinks=thinks, template_options={})


def _effort_of(budget: int) -> str:
    """Return the effort that is nearest to a budget of reasoning tokens."""
    return next((effort for effort, tokens in EFFORT_TOKENS if budget <= tokens), "high")


def _num_bytes(conversation: Conversation) -> int:
    """Return the number of bytes of the texts, calls and tools of a conversation."""
    total = len(conversation.prefill.encode(errors="replace"))
    for message in conversation.messages:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        total += sum(len(part["text"].encode(errors="replace")) for part in parts if part["type"] == "text")
        total += sum(map(_bytes_of, message.get("tool_calls") or ()))
    if conversation.tools is not None:
        total += sum(_bytes_of(tool.for_template()) for tool in conversation.tools.tools)
    return total


def _bytes_of(value: Mapping[str, Any]) -> int:
    return len(msgspec.json.encode(value))
