"""Converts prompts to token ids with the tokenizer and template of an engine's model card.

No model files are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT, BadRequest, ContextTooLong
from moiety_platform.inference.generation import Conversation, Generation, Prompt, TextPair
from moiety_platform.inference.strict_tools import grammar_of_calls
from moiety_platform.inference.template_options import TemplateOptions
from moiety_platform.inference.truncated_inputs import truncated_inputs
from moiety_text.chat import ChatTemplate
from moiety_text.conversation import ConversationEncoder, texts_of
from moiety_text.errors import TemplateRefused, TextNotEncodable, TokenOutOfRange, TooManyTokens
from moiety_text.guarded import GuardedReader
from moiety_text.reasoning import CLOSER, OPENER, AnswerReader, num_thought_tokens, thoughts_of
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Parts
from moiety_text.tools.formats import KNOWN, Opening, ToolFormat, format_of
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import ModelCard, ThoughtMarks

MAX_CACHED_MODELS = 16
MESSAGE_COST = 64  # estimated cost of rendering one more message, in bytes of text
MARKER_TOKENS = 16  # last tokens of a prompt, in which a marker and white space after it fit
ID_COST = 4  # estimated cost of checking one token id, in bytes of text

UNKNOWN_TOKEN = "unknown_token_id"  # error code


class AnswerFormat(msgspec.Struct, frozen=True):
    """Properties of the answers to one prompt that the engine and the answer's parser depend on."""

    shown_ids: tuple[int, ...] = ()  # special tokens that the answer's text must contain for its parser
    marker_ids: tuple[int, ...] = ()  # added tokens that mark tool calls and reasoning in the answer
    thought: ThoughtMarks | None = None  # markers of the reasoning that the answer may begin with
    grammar: GrammarSpec | None = None  # grammar of the answer


class ModelText:
    """Tokenizer, chat template and answer parser of one model. Thread-safe."""

    def __init__(self, card: ModelCard, inline_bytes: int) -> None:
        self._tokenizer = Tokenizer.from_json(card.tokenizer_json)
        template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        self._conversations = (
            ConversationEncoder(self._tokenizer, card.tokenizer_json, template) if template is not None else None
        )
        self._knows_tools = template is not None and template.knows_tools
        self._tool_format = format_of(card.chat_template) if self._knows_tools else None
        self._thoughts = None if template is None else thoughts_of(template)
        self.thinks = self._thoughts is not None  # whether chat answers may begin with reasoning
        self._options = None if template is None else TemplateOptions(card.model, template, self._thoughts)
        ids = {token.content: one for one, token in self._tokenizer.added_tokens.items()}
        self._opener_id, self._closer_id = ids.get(OPENER), ids.get(CLOSER)
        markers = (self._opener_id, self._closer_id) if self._thoughts is not None else ()
        self._special_thoughts = tuple(
            one for one in markers if one is not None and self._tokenizer.added_tokens[one].special
        )
        self._model = card.model
        self.labels, self.score_activation = card.labels, card.score_activation
        self._vocab_size = card.vocab_size
        self._max_context_tokens = card.max_context_tokens
        self.inline_bytes = inline_bytes
        identity = f"{card.model}\0{card.family}\0{card.dtype}\0{card.device}"
        self.fingerprint = "fp_" + blake2b(identity.encode(), digest_size=5).hexdigest()

    async def encode(self, prompts: Sequence[Prompt], field: str = "prompt") -> list[list[int]]:
        """Return the token ids of each prompt, at least one each.

        Long text is encoded in a thread. Raises BadRequest, which may name the `field` of the request, and
        ContextTooLong for a prompt that cannot fit the context, whatever its exact length.
        """
        if self._is_short(prompts):
            return self._encode_all(prompts, field, is_plain=True)
        return await asyncio.to_thread(self._encode_all, prompts, field)

    async def encode_prompts(self, generation: Generation) -> list[list[int]]:
        """Return the token ids of each prompt of a generation.

        Raises the errors of `encode`. Also raises BadRequest, before anything is computed, for a prompt with echo that
        has an id without text.
        """
        if generation.truncate_tokens is not None:
            return (await self._encode_truncated(generation))[0]
        prompts = await self.encode(generation.prompts, generation.prompt_field)
        if generation.echo:
            self._check_decodable(prompts, generation.prompt_field)
        return prompts

    async def encode_pairs(self, generation: Generation) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of each pair of a generation, and where the second segment of each begins.

        The pairs are encoded in a thread. Raises the errors of `encode`.
        """
        if generation.truncate_tokens is not None:
            return await self._encode_truncated(generation)
        pairs = [pair for pair in generation.prompts if isinstance(pair, TextPair)]
        encoded = await asyncio.to_thread(self._encode_pairs, pairs)
        return [ids for ids, _ in encoded], [second for _, second in encoded]

    async def _encode_truncated(self, generation: Generation) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of texts, pairs and token ids, each cut to the generation's limit."""
        limit = self._max_context_tokens
        encoded = await asyncio.to_thread(truncated_inputs, self._tokenizer, generation, limit)
        for ids, _ in encoded:
            self._check_ids(tuple(ids), generation.prompt_field)
        return [ids for ids, _ in encoded], [second for _, second in encoded]

    def _encode_pairs(self, pairs: Sequence[TextPair]) -> list[tuple[list[int], int]]:
        limit = self._max_context_tokens
        try:
            return [self._tokenizer.encode_pair(pair.first, pair.second, max_tokens=limit) for pair in pairs]
        except TooManyTokens as exc:
            raise self._too_long(f"at least {exc.at_least}") from exc
        except TextNotEncodable as exc:
            raise BadRequest(f"the model's tokenizer refused the input: {exc}") from exc

    def _check_decodable(self, prompts: Sequence[Sequence[int]], field: str) -> None:
        """Check that all ids have text. Ids that exist only in the model's padded vocabulary have none."""
        for token_id in sorted({one for prompt in prompts for one in prompt}):
            if self._tokenizer.find_token(token_id) is None:
                message = (
                    f"token id {token_id} has no text in the tokenizer of the model {self._model!r}, so the prompt "
                )
                message += "cannot be echoed; leave out 'echo', or the id"
                raise BadRequest(message, code=UNKNOWN_TOKEN, param=field)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises BadRequest for an id that is not the model's."""
        if len(token_ids) * ID_COST <= self.inline_bytes:
            return self._decode(token_ids)
        return await asyncio.to_thread(self._decode, token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token of an echoed prompt."""
        return self._tokenizer.token_bytes(token_id)

    def new_readers(self, generation: Generation, prompts: Sequence[Sequence[int]]) -> list[AnswerReader] | None:
        """Return parsers of tool calls and reasoning for each sequence of a generation.

        `prompts` are its token ids. Returns None if there can be neither.
        """
        if self._thoughts is None and getattr(generation.prompts[0], "tools", None) is None:
            return None  # the common case; only a chat has tools, and it has only one prompt
        readers = [
            self._new_reader(prompt, token_ids, generation.grammar)
            for prompt, token_ids in zip(generation.prompts, prompts, strict=True)
            for _ in range(generation.num_choices)
        ]
        found = [reader for reader in readers if reader is not None]
        return found if found else None

    async def read_answer(
        self, generation: Generation, prompts: Sequence[Sequence[int]], output_ids: Sequence[int]
    ) -> Parts:
        """Return the parsed parts of a request's only answer."""
        text, readers = await self.decode(output_ids), self.new_readers(generation, prompts)
        return [text] if readers is None else readers[0].read(text)

    def num_thought_tokens(
        self, generation: Generation, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]]
    ) -> int | None:
        """Return the number of reasoning tokens in the answers.

        Returns None where it cannot be counted: the model is not known to reason, or the end of its reasoning is not a
        single token.
        """
        prompt = generation.prompts[0]  # a chat has only one
        if self._closer_id is None or not self._may_think(prompt, generation.grammar):
            return None
        is_open = self._end_of(prompts[0]).endswith(OPENER)
        return sum(num_thought_tokens(ids, self._opener_id, self._closer_id, is_open=is_open) for ids in answers)

    def _new_reader(self, prompt: Prompt, token_ids: Sequence[int], grammar: GrammarSpec | None) -> AnswerReader | None:
        if not isinstance(prompt, Conversation):
            return None
        calls = None
        if prompt.tools is not None:
            calls = self._format_of_tools().new_reader(prompt.tools, is_rest=bool(prompt.prefill.strip()))
        reader: AnswerReader | None = calls
        if self._thoughts is not None and self._may_think(prompt, grammar):
            reader = self._thoughts.new_reader(self._end_of(token_ids), calls)
        return None if reader is None else GuardedReader(reader)

    def answer_format(self, generation: Generation, number: int, prompt_ids: Sequence[int]) -> AnswerFormat:
        """Return the format of the answers to the generation's prompt `number`, whose token ids are `prompt_ids`.

        Raises BadRequest for strict tools that cannot be enforced.
        """
        prompt, grammar = generation.prompts[number], generation.grammar
        if not isinstance(prompt, Conversation) or (self._thoughts is None and prompt.tools is None):
            return AnswerFormat(grammar=grammar)
        return AnswerFormat(
            self._shown_ids(prompt),
            self._marker_ids(prompt, grammar),
            self._thought_marks(generation, number, prompt_ids),
            grammar or self._grammar_of_calls(prompt),
        )

    def _thought_marks(self, generation: Generation, number: int, prompt_ids: Sequence[int]) -> ThoughtMarks | None:
        """Return the markers of the reasoning that answers to the generation's prompt `number` may begin with."""
        if not self._may_think(generation.prompts[number], generation.grammar):
            return None
        return ThoughtMarks(OPENER, CLOSER, self._end_of(prompt_ids).endswith(OPENER))

    def _may_think(self, prompt: Prompt, grammar: GrammarSpec | None) -> bool:
        """Return whether the answer may begin with reasoning.

        A grammar applies from the first token on, and an answer with a prefill does not begin with reasoning.
        """
        is_chat = isinstance(prompt, Conversation) and not prompt.prefill.strip()
        return self._thoughts is not None and is_chat and grammar is None

    def _end_of(self, token_ids: Sequence[int]) -> str:
        """Return the end of a prompt's text, which may have a marker."""
        return self._decode(token_ids[-MARKER_TOKENS:]).rstrip()

    def _shown_ids(self, prompt: Conversation) -> tuple[int, ...]:
        """Return the special tokens that the answer's text must contain for its parser."""
        added = self._tokenizer.added_tokens
        calls = () if prompt.tools is None else self._call_markers().values()
        return (*(one for one in calls if added[one].special), *self._special_thoughts)

    def _marker_ids(self, prompt: Conversation, grammar: GrammarSpec | None) -> tuple[int, ...]:
        """Return the added tokens that mark tool calls and reasoning in the answer.

        They let the parser distinguish markers from text that only spells one.
        """
        calls = () if prompt.tools is None else self._call_markers().values()
        thoughts = (self._opener_id, self._closer_id) if self._may_think(prompt, grammar) else ()
        return (*calls, *(one for one in thoughts if one is not None))

    def _grammar_of_calls(self, prompt: Conversation) -> GrammarSpec | None:
        """Return the grammar of an answer with strict tools, or None without strict tools. Raises BadRequest."""
        if prompt.tools is None or not prompt.tools.is_strict:
            return None
        way = self._format_of_tools()
        grammar = None
        if way.marks_calls or not prompt.prefill.strip():
            grammar = grammar_of_calls(way, prompt.tools, self._call_markers(), self._free_ids())
        if grammar is None:
            message = f"calls of the model {self._model!r} cannot be held to a schema here; leave 'strict' out"
            raise BadRequest(message, code=UNSUPPORTED_RESPONSE_FORMAT, param="tools")
        return grammar

    def _call_markers(self) -> dict[str, int]:
        """Return the markers of tool calls that are added tokens, with their ids."""
        markers, added = self._format_of_tools().markers, self._tokenizer.added_tokens
        return {token.content: one for one, token in added.items() if token.content in markers}

    def _free_ids(self) -> list[int]:
        """Return the added tokens that are allowed in the text beside tool calls.

        These are the tokens of reasoning and the tokens with text, but no markers of calls or turns.
        """
        markers = self._call_markers().values()
        return [
            one
            for one, token in sorted(self._tokenizer.added_tokens.items())
            if one not in markers and (one in self._special_thoughts or not token.special)
        ]

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        except TokenOutOfRange as exc:
            raise BadRequest(str(exc), code=UNKNOWN_TOKEN) from exc

    def _is_short(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether encoding takes less time than a thread costs, and no text spells a control token.

        The cost is an estimate, but True is always safe.
        """
        left = self.inline_bytes
        for prompt in prompts:
            if isinstance(prompt, tuple):
                left -= ID_COST * len(prompt)
            elif isinstance(prompt, str):
                left -= _num_bytes(prompt, left)
            elif isinstance(prompt, TextPair):
                return False
            else:
                left = self._after_conversation(prompt, left)
            if left < 0:
                return False
        return True

    def _after_conversation(self, prompt: Conversation, left: int) -> int:
        """Return the rest of the byte budget `left` after the conversation's texts.

        A negative result means that the budget is exceeded or that a text spells a control token.
        """
        tools = [] if prompt.tools is None else _tools_of(prompt.tools)
        left -= MESSAGE_COST * (len(prompt.messages) - 1 + len(tools))
        if left < 0:
            return left
        texts, room = [], left
        for text in texts_of((prompt.messages, tools, prompt.prefill, prompt.template_options)):
            room -= len(text)
            if room < 0:  # stop early: the rest may be megabytes
                return room
            texts.append(text)
        text = "".join(texts)
        left -= len(text) if text.isascii() else _num_bytes(text, left)
        encoder = self._conversations
        return -1 if encoder is not None and encoder.is_control_token_in(texts) else left

    def _encode_all(self, prompts: Sequence[Prompt], field: str, *, is_plain: bool = False) -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, tuple):
                encoded.append(self._check_ids(prompt, field))
            elif not isinstance(prompt, TextPair):  # pairs: see `encode_pairs`
                encoded.append(self._encode(prompt, is_plain))
        return encoded

    def _encode(self, prompt: Conversation | str, is_plain: bool) -> list[int]:
        limit = self._max_context_tokens
        if prompt == "":  # a BOS token alone would count as a token that the client did not send
            raise BadRequest("the prompt is empty; send at least one token of text")
        try:
            if isinstance(prompt, str):
                token_ids = self._tokenizer.encode(prompt, add_special_tokens=True, max_tokens=limit)
            else:
                token_ids = self._encode_conversation(prompt, is_plain)
        except TooManyTokens as exc:
            raise self._too_long(f"at least {exc.at_least}") from exc
        except (TextNotEncodable, TemplateRefused) as exc:
            raise BadRequest(f"the model's chat template or tokenizer refused the input: {exc}") from exc
        if not token_ids:
            raise BadRequest("the prompt is empty; send at least one token of text")
        return token_ids

    def _encode_conversation(self, conversation: Conversation, is_plain: bool) -> list[int]:
        if self._conversations is None or self._options is None:
            raise BadRequest(
                f"the model {self._model!r} has no chat template; use /v1/completions with a prompt", param="messages"
            )
        opening, tools = Opening(), []
        messages: Sequence[Mapping[str, Any]] = conversation.messages
        extra = {}
        if conversation.template_options or conversation.thinks is not None or conversation.effort is not None:
            extra = self._options.variables_of(conversation)
        if conversation.tools is not None:
            opening, tools = self._format_of_tools().opening(conversation.tools), _tools_of(conversation.tools)
        for message in messages:
            if "tool_calls" in message:
                self._format_of_tools("messages")
                break
        if self._tool_format is not None:
            messages = self._tool_format.adapted(messages)
        return self._conversations.encode(
            messages,
            tools=tools,
            opening=opening,
            prefill=conversation.prefill,
            extra=extra,
            max_tokens=self._max_context_tokens,
            is_plain=is_plain,
        )

    def _format_of_tools(self, field: str = "tools") -> ToolFormat:
        """Return the model's tool call format. Raises BadRequest, which names the `field`, if there is none."""
        if self._tool_format is not None:
            return self._tool_format
        reason = (
            f"writes calls of tools in a form that is not known here; known are those of {KNOWN}"
            if self._knows_tools
            else "knows no tools"
        )
        raise BadRequest(
            f"the chat template of the model {self._model!r} {reason}. Leave the tools out, or use another model",
            code="tools_not_supported",
            param=field,
        )

    def _check_ids(self, token_ids: tuple[int, ...], field: str) -> list[int]:
        if not token_ids:
            raise BadRequest("a prompt is empty; send at least one token id", param=field)
        if max(token_ids) >= self._vocab_size:
            message = f"token id {max(token_ids)} is not the model's; its ids are below {self._vocab_size}"
            raise BadRequest(message, code=UNKNOWN_TOKEN, param=field)
        return list(token_ids)

    def _too_long(self, num_tokens: str) -> ContextTooLong:
        return ContextTooLong(
            f"the prompt has {num_tokens} tokens; the model's context is {self._max_context_tokens} tokens. "
            "Shorten the prompt"
        )


def _num_bytes(text: str, at_most: int) -> int:
    return len(text) if len(text) > at_most or text.isascii() else len(text.encode(errors="replace"))


def _tools_of(offer: ToolOffer) -> list[dict[str, Any]]:
    """Return the tools in the format of chat templates."""
    return [tool.for_template() for tool in offer.tools]


class ModelTexts:
    """The `ModelText` of each connected model, built once, in a thread."""

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        self._built: dict[tuple[Any, ...], ModelText] = {}
        self._building = asyncio.Lock()

    def use(self, inline_bytes: int) -> None:
        """Set the inline limit for later prompts."""
        self._inline_bytes = inline_bytes
        for text in self._built.values():
            text.inline_bytes = inline_bytes

    async def get(self, card: ModelCard) -> ModelText:
        """Return the `ModelText` of a card. Raises moiety_text's errors if the card's files cannot be used."""
        files = (card.tokenizer_json, card.chat_template)
        key = (card.model, card.device, *files, card.max_context_tokens, card.labels, card.score_activation)
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
