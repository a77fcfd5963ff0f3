"""Converts prompts to token ids with the tokenizer and template of an engine's model card.

No model files are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from moiety_platform.errors import BadRequest, prompt_too_long
from moiety_platform.inference import thought_limits
from moiety_platform.inference.answer_format import AnswerFormat
from moiety_platform.inference.call_grammars import CallGrammars
from moiety_platform.inference.custom_tools import text_format_of
from moiety_platform.inference.encoded_pairs import encode_pairs
from moiety_platform.inference.encoding_cost import ID_COST, is_short, tools_for_template
from moiety_platform.inference.generation import Conversation, Generation, Prompt, TextPair
from moiety_platform.inference.harmony_answers import HarmonyAnswers
from moiety_platform.inference.prompt_images import images_not_supported, with_placeholders
from moiety_platform.inference.system_messages import as_user_messages, takes_late_system
from moiety_platform.inference.template_options import TemplateOptions
from moiety_platform.inference.token_ids import UNKNOWN_TOKEN, check_decodable, check_ids, runs_of_words
from moiety_platform.inference.tool_result_images import shows_result_images, with_images_after_results
from moiety_platform.inference.truncated_inputs import truncated_inputs
from moiety_text.chat import ChatTemplate
from moiety_text.conversation import ConversationEncoder
from moiety_text.errors import TemplateRefused, TextNotEncodable, TokenOutOfRange, TooManyTokens
from moiety_text.harmony.format import harmony_of
from moiety_text.harmony.messages import adapted
from moiety_text.marker_guards import GuardedReader
from moiety_text.reasoning import AnswerReader, num_thought_tokens, thoughts_of
from moiety_text.reasoning_formats import THINK
from moiety_text.segment_cache import NO_SCOPE, Scope, SegmentCache
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.deltas import Parts
from moiety_text.tools.formats import Opening, ToolFormat
from moiety_text.tools.offer import Tool, ToolOffer
from moiety_text.tools.registry import FORMAT_NAMES, adapt_to_template, find_tool_format
from moiety_wire.grammars import GrammarSpec
from moiety_wire.messages import ModelCard
from moiety_wire.thought_budget import ThoughtBudget, ThoughtMarks

MARKER_TOKENS = 16  # last tokens of a prompt, in which a marker and white space after it fit


def encoding_scope(tenant_id: str, generation: Generation) -> Scope:
    """Return whose texts a generation's are: the tenant's, or those of the client's own salt if it sent one."""
    own = generation.cache_salt
    return tenant_id, blake2b(own.encode(errors="replace"), digest_size=32).digest() if own else b""


class ModelText:
    """Tokenizer, chat template and answer parser of one model. Thread-safe."""

    def __init__(self, card: ModelCard, inline_bytes: int, cache: SegmentCache | None = None) -> None:
        self._tokenizer = Tokenizer.from_json(card.tokenizer_json)
        template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        self._knows_tools = template is not None and template.knows_tools
        self._tool_format: ToolFormat | None = None
        if template is not None and self._knows_tools:
            found = find_tool_format(card.chat_template, card.tool_format)
            self._tool_format = None if found is None else adapt_to_template(found, template)
        self._takes_late_system = template is None or takes_late_system(template)
        harmony = None if template is None else harmony_of(template, self._tokenizer)
        self._harmony = None if harmony is None else HarmonyAnswers(harmony, card)
        self._thoughts = (
            None if template is None or harmony is not None else thoughts_of(template, card.reasoning_format)
        )
        self._conversations = None
        if template is not None:
            calls = () if self._tool_format is None else self._tool_format.markers
            around = None if self._thoughts is None else (self._thoughts.markers.opener, self._thoughts.markers.closer)
            self._conversations = ConversationEncoder(
                self._tokenizer, card.tokenizer_json, template, calls, around, cache
            )
        self.thinks = self._thoughts is not None or harmony is not None  # whether chat answers may begin with reasoning
        self._keeps_budgets = card.controls_reasoning
        self._reasons_by_grammar = card.controls_reasoning and card.follows_grammars
        ids = {token.content: token_id for token_id, token in self._tokenizer.added_tokens.items()}
        marks = THINK if self._thoughts is None else self._thoughts.markers
        self._opener_id, self._closer_id = ids.get(marks.opener_token or marks.opener), ids.get(marks.closer)
        self._space_ids = frozenset() if self._thoughts is None else thought_limits.space_tokens(self._tokenizer)
        self._thought_ids = tuple(ids[token] for token in marks.tokens if token in ids)
        shown = (self._opener_id, self._closer_id) if self._thoughts is not None else ()
        self._thought_closing = "" if template is None else thought_limits.closing_text(template, marks.closer)
        self._special_thoughts = tuple(
            token_id for token_id in shown if token_id is not None and self._tokenizer.added_tokens[token_id].special
        )
        self._calls = None
        if self._tool_format is not None:
            self._calls = CallGrammars(self._tool_format, self._tokenizer, card, self._special_thoughts)
        switch = None if self._thoughts is None else self._thoughts.switch
        keeps_budget = self._keeps_budgets and (harmony is not None or self._closer_id is not None)
        self._options = None
        if template is not None:
            self._options = TemplateOptions(card.model, template, switch, thinks=self.thinks, keeps_budget=keeps_budget)
        self._end_ids = card.eos_token_ids
        self.special_ids = tuple(token_id for token_id, token in self._tokenizer.added_tokens.items() if token.special)
        self._model = card.model
        self.image_rules = card.images
        placeholder = None if card.images is None else self._tokenizer.find_token(card.images.image_token_id)
        self._shows_result_images = shows_result_images(template, placeholder, self._tool_format)
        self.labels, self.score_activation = card.labels, card.score_activation
        self.unit_vectors = card.unit_vectors
        self._vocab_size = card.vocab_size
        self._max_context_tokens = card.max_context_tokens
        self.inline_bytes = inline_bytes
        self.estimate: Callable[[Generation], int] | None = None  # of the most prompt tokens, if they cannot be counted
        identity = f"{card.model}\0{card.family}\0{card.dtype}\0{card.device}"
        self.fingerprint = "fp_" + blake2b(identity.encode(), digest_size=5).hexdigest()

    async def encode(
        self,
        prompts: Sequence[Prompt],
        field: str = "prompt",
        *,
        adds_special_tokens: bool = True,
        scope: Scope = NO_SCOPE,
    ) -> list[list[int]]:
        """Return the token ids of each prompt, at least one each.

        Long text is encoded in a thread. With a `scope` the parts of conversations that were encoded in it before are
        taken from the encoding cache. Raises BadRequest, which may name the `field` of the request, and ContextTooLong
        for a prompt that cannot fit the context, whatever its exact length.
        """
        if is_short(prompts, self.inline_bytes, self._conversations):
            return self._encode_all(prompts, field, adds_special_tokens, scope, is_plain=True)
        return await asyncio.to_thread(self._encode_all, prompts, field, adds_special_tokens, scope)

    async def encode_whole(self, conversation: Conversation, scope: Scope = NO_SCOPE) -> list[int]:
        """Return the token ids of a conversation, even if they are more than the model's context.

        A long one is encoded in a thread; `scope` is that of `encode`. Raises BadRequest.
        """
        if is_short([conversation], self.inline_bytes, self._conversations):
            return self._encode(conversation, is_plain=True, is_limited=False, scope=scope)
        return await asyncio.to_thread(self._encode, conversation, is_limited=False, scope=scope)

    async def encode_prompts(self, generation: Generation, tenant_id: str = "") -> list[list[int]]:
        """Return the token ids of each prompt of a generation, by the encoding cache if the tenant is given.

        Raises the errors of `encode`. Also raises BadRequest, before anything is computed, for a prompt with echo that
        has an id without text.
        """
        if generation.truncate_tokens is not None:
            return (await self._encode_truncated(generation))[0]
        scope = encoding_scope(tenant_id, generation) if generation.cache_salt else (tenant_id, b"")
        adds = generation.adds_special_tokens
        prompts = await self.encode(generation.prompts, generation.prompt_field, adds_special_tokens=adds, scope=scope)
        if generation.echo:
            check_decodable(self._tokenizer, self._model, prompts, generation.prompt_field)
        return prompts

    async def encode_pairs(self, generation: Generation) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of each pair of a generation, and where the second segment of each begins.

        The pairs are encoded in a thread. Raises the errors of `encode`.
        """
        if generation.truncate_tokens is not None:
            return await self._encode_truncated(generation)
        pairs = [pair for pair in generation.prompts if isinstance(pair, TextPair)]
        encoded = await asyncio.to_thread(encode_pairs, self._tokenizer, pairs, self._max_context_tokens)
        return [ids for ids, _ in encoded], [second for _, second in encoded]

    async def _encode_truncated(self, generation: Generation) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of texts, pairs and token ids, each cut to the generation's limit."""
        limit = self._max_context_tokens
        encoded = await asyncio.to_thread(truncated_inputs, self._tokenizer, generation, limit, self._encode)
        for ids, _ in encoded:
            check_ids(ids, self._vocab_size, generation.prompt_field)
        return [ids for ids, _ in encoded], [second for _, second in encoded]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Raises BadRequest for an id that is not the model's."""
        if len(token_ids) * ID_COST <= self.inline_bytes:
            return self._decode(token_ids)
        return await asyncio.to_thread(self._decode, token_ids)

    def runs_of_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of words that answers must not have. Raises BadRequest."""
        return runs_of_words(self._tokenizer, words)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token of an echoed prompt."""
        return self._tokenizer.token_bytes(token_id)

    def new_readers(self, generation: Generation, prompts: Sequence[Sequence[int]]) -> list[AnswerReader] | None:
        """Return parsers of tool calls and reasoning for each sequence of a generation.

        `prompts` are its token ids. Returns None if there can be neither.
        """
        if not self.thinks and getattr(generation.prompts[0], "tools", None) is None:
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
        if self._harmony is not None:
            return self._harmony.num_thought_tokens(prompt, answers)
        if self._thoughts is None or self._closer_id is None or not self._may_think(prompt, generation.grammar):
            return None
        is_open = self._thoughts.is_open_after(self._end_of(prompts[0]))
        opener, closer, spaces = self._opener_id, self._closer_id, self._space_ids
        return sum(num_thought_tokens(ids, opener, closer, is_open=is_open, space_ids=spaces) for ids in answers)

    def _new_reader(self, prompt: Prompt, token_ids: Sequence[int], grammar: GrammarSpec | None) -> AnswerReader | None:
        if not isinstance(prompt, Conversation):
            return None
        if self._harmony is not None:
            return GuardedReader(self._harmony.new_reader(prompt))
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
        if not isinstance(prompt, Conversation) or (not self.thinks and prompt.tools is None):
            return AnswerFormat(grammar=grammar)
        if self._harmony is not None:
            return self._harmony.answer_format(prompt, grammar)
        marks = self._thought_marks(generation, number, prompt_ids)
        if prompt.tools is not None:
            ignore_eos, calls = generation.ignore_eos, self._calls_of_tools()
            grammar = calls.grammar(prompt, prompt.tools, grammar, ignore_eos=ignore_eos)
        return AnswerFormat(
            self._shown_ids(prompt),
            self._marker_ids(prompt, generation.grammar),
            marks,
            self._after_thought(prompt, prompt_ids, grammar, marks),
            self._thought_budget(prompt, marks),
        )

    def _after_thought(
        self,
        prompt: Conversation,
        prompt_ids: Sequence[int],
        grammar: GrammarSpec | None,
        marks: ThoughtMarks | None,
    ) -> GrammarSpec | None:
        """Return the grammar with the reasoning that may come before it; the grammar itself where there can be none."""
        is_begun = prompt.tools is not None and prompt.tools.must_call
        if grammar is None or marks is None or not self._reasons_by_grammar or is_begun:
            return grammar
        if self._end_of(prompt_ids).endswith(marks.closer):  # the prompt has ended the reasoning
            return grammar
        return thought_limits.grammar_after_thought(grammar, marks, self._tokenizer, self._end_ids)

    def _thought_budget(self, prompt: Conversation, marks: ThoughtMarks | None) -> ThoughtBudget | None:
        """Return the budget of the answer's reasoning; None where there is none or it cannot be enforced."""
        if marks is None or prompt.thought_budget is None or not self._keeps_budgets:
            return None
        return thought_limits.budget_of_markers(
            prompt.thought_budget, marks, self._thought_closing, self._tokenizer, self._space_ids
        )

    def _thought_marks(self, generation: Generation, number: int, prompt_ids: Sequence[int]) -> ThoughtMarks | None:
        """Return the markers of the reasoning that answers to the generation's prompt `number` may begin with."""
        if self._thoughts is None or not self._may_think(generation.prompts[number], generation.grammar):
            return None
        marks, is_open = self._thoughts.markers, self._thoughts.is_open_after(self._end_of(prompt_ids))
        return ThoughtMarks(marks.opener, marks.closer, is_open, marks.answer_opener)

    def _may_think(self, prompt: Prompt, grammar: GrammarSpec | None) -> bool:
        """Return whether the answer may begin with reasoning.

        An answer with a prefill does not begin with reasoning, nor does one with a grammar on an engine where grammars
        apply from the first token on.
        """
        is_chat = isinstance(prompt, Conversation) and not prompt.prefill.strip()
        return self._thoughts is not None and is_chat and (grammar is None or self._reasons_by_grammar)

    def _end_of(self, token_ids: Sequence[int]) -> str:
        """Return the end of a prompt's text, which may have a marker."""
        return self._decode(token_ids[-MARKER_TOKENS:]).rstrip()

    def _shown_ids(self, prompt: Conversation) -> tuple[int, ...]:
        """Return the special tokens that the answer's text must contain for its parser."""
        added = self._tokenizer.added_tokens
        calls = () if prompt.tools is None else self._calls_of_tools().markers.values()
        return (*(call for call in calls if added[call].special), *self._special_thoughts)

    def _marker_ids(self, prompt: Conversation, grammar: GrammarSpec | None) -> tuple[int, ...]:
        """Return the added tokens that mark tool calls and reasoning in the answer.

        They let the parser distinguish markers from text that only spells one.
        """
        calls = () if prompt.tools is None else self._calls_of_tools().markers.values()
        return (*calls, *(self._thought_ids if self._may_think(prompt, grammar) else ()))

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=False)
        except TokenOutOfRange as exc:
            raise BadRequest(str(exc), code=UNKNOWN_TOKEN) from exc

    def _encode_all(
        self, prompts: Sequence[Prompt], field: str, adds_special_tokens: bool, scope: Scope, *, is_plain: bool = False
    ) -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            if isinstance(prompt, tuple):
                encoded.append(check_ids(prompt, self._vocab_size, field))
            elif not isinstance(prompt, TextPair):  # pairs: see `encode_pairs`
                encoded.append(self._encode(prompt, is_plain, adds_special_tokens, scope=scope))
        return encoded

    def _encode(
        self,
        prompt: Conversation | str,
        is_plain: bool = False,
        adds_special_tokens: bool = True,
        is_limited: bool = True,
        scope: Scope = NO_SCOPE,
    ) -> list[int]:
        """Return the ids of a prompt. With `is_limited` a prompt that certainly does not fit the context is refused."""
        limit = self._max_context_tokens if is_limited else None
        if prompt == "":  # a BOS token alone would count as a token that the client did not send
            raise BadRequest("the prompt is empty; send at least one token of text")
        try:
            if isinstance(prompt, str):
                token_ids = self._tokenizer.encode(prompt, add_special_tokens=adds_special_tokens, max_tokens=limit)
            else:
                token_ids = self._encode_conversation(prompt, is_plain, limit, scope)
        except TooManyTokens as exc:
            most = self._max_context_tokens
            raise prompt_too_long(f"at least {exc.at_least}", most, most) from exc
        except (TextNotEncodable, TemplateRefused) as exc:
            raise BadRequest(f"the model's chat template or tokenizer refused the input: {exc}") from exc
        if not token_ids:
            raise BadRequest("the prompt is empty; send at least one token of text")
        return token_ids

    def _encode_conversation(
        self, conversation: Conversation, is_plain: bool, max_tokens: int | None, scope: Scope
    ) -> list[int]:
        if self._conversations is None or self._options is None:
            raise BadRequest(
                f"the model {self._model!r} has no chat template; use /v1/completions with a prompt", param="messages"
            )
        if conversation.documents:
            raise RuntimeError("a conversation's documents must be read before its prompt is made")
        if conversation.images and self.image_rules is None:
            raise images_not_supported(self._model, conversation.images[0])
        tools = [] if conversation.tools is None else tools_for_template(conversation.tools)
        extra = self._options.variables_of(conversation) if conversation.has_reasoning_options else {}
        opening, messages = self._begun(conversation)
        token_ids = self._conversations.encode(
            messages,
            tools=tools,
            opening=opening,
            prefill=conversation.prefill,
            extra=extra,
            max_tokens=max_tokens,
            is_plain=is_plain,
            scope=scope,
        )
        if self.image_rules is None:
            return token_ids
        return with_placeholders(token_ids, conversation.images, self.image_rules, self._model)

    def _begun(self, conversation: Conversation) -> tuple[Opening, Sequence[Mapping[str, Any]]]:
        """Return the beginning of the answer, and the messages in the template's form. Raises BadRequest."""
        messages: Sequence[Mapping[str, Any]] = conversation.messages
        if conversation.images and not self._shows_result_images:
            messages = with_images_after_results(messages)
        if not self._takes_late_system:
            messages = as_user_messages(messages)
        if self._harmony is not None:
            return self._harmony.opening(conversation), adapted(messages)
        opening = Opening()
        if conversation.tools is not None:
            opening = self._format_of_tools().opening(conversation.tools)
        for message in messages:
            if "tool_calls" in message:
                self._format_of_tools("messages")
                break
        return opening, messages if self._tool_format is None else self._tool_format.adapted(messages)

    def adjusted_fields(self, generation: Generation) -> dict[str, str]:
        """Return the fields whose values the model or its engine cannot follow, with what is used instead."""
        prompt = generation.prompts[0]  # a chat has only one
        if self._options is None or not isinstance(prompt, Conversation):
            return {}
        found = self._options.adjusted_fields(prompt) if prompt.has_reasoning_options else {}
        if (offer := prompt.tools) is not None:
            for tool in offer.tools:
                if tool.input_grammar is not None and not self._follows_input(generation, offer, tool):
                    found = {**found, text_format_of(tool): "text"}
        return found

    def _follows_input(self, generation: Generation, offer: ToolOffer, tool: Tool) -> bool:
        """Return whether calls are held to the grammar of a custom tool's input."""
        if self._harmony is not None:
            return self._harmony.follows_input(tool)
        return not generation.ignore_eos and self._calls_of_tools().follows_input(offer, tool)

    def _calls_of_tools(self) -> CallGrammars:
        """Return the grammars of the model's tool calls. Raises BadRequest if it has no format of them."""
        self._format_of_tools()
        assert self._calls is not None, "the model has a format of tool calls"
        return self._calls

    def _format_of_tools(self, field: str = "tools") -> ToolFormat:
        """Return the model's tool call format. Raises BadRequest, which names the `field`, if there is none."""
        if self._tool_format is not None:
            return self._tool_format
        reason = (
            "does not show in which format the model calls tools, or leaves out the calls of earlier answers; start "
            f"its engine with --tool-format and one of {', '.join(FORMAT_NAMES)}, leave the tools out, or use another "
            "model"
            if self._knows_tools
            else "knows no tools. Leave the tools out, or use another model"
        )
        raise BadRequest(
            f"the chat template of the model {self._model!r} {reason}",
            code="tools_not_supported",
            param=field,
        )
