"""From prompts to token ids with the tokenizer and template on an engine's model card; no model files are needed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

from moiety_platform.completions.generation import Conversation, Prompt
from moiety_platform.errors import BadRequest
from moiety_text.chat import ChatTemplate
from moiety_text.errors import TemplateRefused, TextNotEncodable, TokenOutOfRange
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import Card

MAX_CACHED_MODELS = 16


class ModelText:
    """One model's text side. Immutable; may be used from several threads."""

    def __init__(self, card: Card, inline_bytes: int) -> None:
        self._tokenizer = Tokenizer.from_json(card.tokenizer_json)
        self._template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        self._model = card.model
        self._vocab_size = card.vocab_size
        self._inline_chars = inline_bytes // 4 or 1
        self._inline_bytes = inline_bytes
        identity = f"{card.model}\0{card.family}\0{card.dtype}\0{card.device}"
        self.fingerprint = "fp_" + blake2b(identity.encode(), digest_size=5).hexdigest()

    async def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt, at least one. Long text is worked on in a thread. Raises BadRequest."""
        if isinstance(prompt, tuple):
            return self._check_ids(prompt)
        if self._is_short(prompt):
            return self._encode(prompt)
        return await asyncio.to_thread(self._encode, prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises BadRequest for an id that is not the model's."""
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        except TokenOutOfRange as exc:
            raise BadRequest(str(exc)) from exc

    def _is_short(self, prompt: Conversation | str) -> bool:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt.messages]
        return sum(map(len, texts)) <= self._inline_chars or sum(len(t.encode()) for t in texts) <= self._inline_bytes

    def _encode(self, prompt: Conversation | str) -> list[int]:
        try:
            if isinstance(prompt, str):
                token_ids = self._tokenizer.encode(prompt, add_special_tokens=True)
            else:
                token_ids = self._tokenizer.encode(self._render(prompt))
        except (TextNotEncodable, TemplateRefused) as exc:
            raise BadRequest(f"the model's chat template or tokenizer refused the input: {exc}") from exc
        if not token_ids:
            raise BadRequest("the prompt is empty; send at least one token of text")
        return token_ids

    def _render(self, conversation: Conversation) -> str:
        if self._template is None:
            raise BadRequest(
                f"the model {self._model!r} has no chat template; use /v1/completions with a prompt", param="messages"
            )
        return self._template.render(conversation.messages)

    def _check_ids(self, token_ids: tuple[int, ...]) -> list[int]:
        if not token_ids:
            raise BadRequest("a prompt is empty; send at least one token id", param="prompt")
        if max(token_ids) >= self._vocab_size:
            raise BadRequest(
                f"token id {max(token_ids)} is not the model's; its ids are below {self._vocab_size}", param="prompt"
            )
        return list(token_ids)


class ModelTexts:
    """The text sides of the connected models, each built once, in a thread."""

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._built: dict[tuple[str, str, str, str], ModelText] = {}
        self._building = asyncio.Lock()

    async def get(self, card: Card) -> ModelText:
        """The text side of a card. Raises moiety_text's errors if the card's files cannot be used."""
        key = (card.model, card.device, card.tokenizer_json, card.chat_template)
        text = self._built.get(key)
        if text is not None:
            return text
        async with self._building:
            if key not in self._built:
                built = await asyncio.to_thread(ModelText, card, self._inline_bytes)
                while len(self._built) >= MAX_CACHED_MODELS:
                    self._built.pop(next(iter(self._built)))
                self._built[key] = built
            return self._built[key]
