"""Encoding of messages to token ids so that a client's text never becomes a control token of the model.

A template writes control tokens (`<|im_start|>` …) around texts that clients wrote, and an encoder cannot tell the two
apart. Ordinary messages are rendered and encoded as in `transformers`. Where a client's text spells a control token,
each spelling is broken by a marker that cannot be guessed before rendering; every remaining spelling is the template's
own. These are renamed to unguessable names, the markers are removed, and a second tokenizer, which knows the control
tokens only by the new names, encodes the whole in one pass.

Control tokens are the special tokens, those of the model's tool-call format, and other added tokens of the shape
`<|…|>` or that mark tools (`<tool_call>`). Other added tokens (`<think>`, runs of spaces) keep their meaning in any
text.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tokenizers

from moiety_text.chat import ChatTemplate
from moiety_text.errors import TextNotEncodable
from moiety_text.segment_cache import NO_SCOPE, Scope, SegmentCache, SegmentEncoder, boundaries_in
from moiety_text.tokenizer import Tokenizer
from moiety_text.tools.formats import Opening

_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>|</?tools?(?:_\w+)?>", re.DOTALL)
_MARKER_ALPHABET = [chr(code) for code in range(0xE000, 0xF900)]  # private use: no filter of a template changes them
_MARKER_LENGTH = 10
_BETWEEN = "\0"  # joins texts for one search; if a token contains it, the guarded path is used needlessly
_MATCHES_NOTHING = re.compile(r"(?!)")
_NO_OPENING = Opening()
_NO_EXTRA_VARIABLES: Mapping[str, Any] = MappingProxyType({})

Structure = Mapping[str, Any]  # a message or a tool, in the form of templates


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text in a message or a tool, or in several, including keys."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, (dict, Mapping)):  # nearly always a dict, for which the check is fast
            yield from item
            for inner in item.values():
                if isinstance(inner, str):
                    yield inner
                else:
                    waiting.append(inner)


class ConversationEncoder:
    """Renderer and encoder of one model's conversations. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokenizer_json: str,
        template: ChatTemplate,
        call_markers: Sequence[str] = (),
        reasoning: tuple[str, str] | None = None,
        cache: SegmentCache | None = None,
    ) -> None:
        """Create the encoder.

        `cache` keeps the token ids of texts that were encoded in a scope. `call_markers` mark tool calls in the
        model's format, and are control tokens. `reasoning` are the markers before and after reasoning, which is closed
        before the opening of a call and before the beginning of an answer.
        """
        self._reasoning = reasoning
        self._tokenizer = tokenizer
        self._tokenizer_json = tokenizer_json
        self._template = template
        self._marker = "".join(secrets.choice(_MARKER_ALPHABET) for _ in range(_MARKER_LENGTH))
        names = sorted(
            (
                token.content
                for token in tokenizer.added_tokens.values()
                if token.content
                and (token.special or token.content in call_markers or _CONTROL_SHAPE.fullmatch(token.content))
            ),
            key=len,
            reverse=True,
        )
        self._names = {name: f"{self._marker}{number}{self._marker}" for number, name in enumerate(names)}
        self._control = re.compile("|".join(map(re.escape, names))) if names else _MATCHES_NOTHING
        self._guarded: _GuardedTokenizer | None = None
        self._building = threading.Lock()
        boundaries = boundaries_in(tokenizer, template.literals, names)
        self._segments = SegmentEncoder(tokenizer, boundaries, cache) if boundaries and cache is not None else None

    def spells_control_token(
        self,
        messages: Sequence[Structure],
        *,
        tools: Sequence[Structure] = (),
        prefill: str = "",
        extra: Structure = _NO_EXTRA_VARIABLES,
    ) -> bool:
        """Return whether a client's text would be read as a control token.

        Encoding is then slower; the first time, it takes about a second.
        """
        texts = [prefill, *texts_of((tools, extra))]
        for message in messages:
            texts += texts_of([value for name, value in message.items() if name != "role"])
        return self.is_control_token_in(texts)

    def is_control_token_in(self, texts: Sequence[str]) -> bool:
        """Return whether one of these texts would be read as a control token."""
        return self._control.search(_BETWEEN.join(texts)) is not None

    def encode(
        self,
        messages: Sequence[Structure],
        *,
        tools: Sequence[Structure] = (),
        opening: Opening = _NO_OPENING,
        prefill: str = "",
        extra: Structure = _NO_EXTRA_VARIABLES,
        max_tokens: int | None = None,
        is_plain: bool = False,
        scope: Scope = NO_SCOPE,
    ) -> list[int]:
        """Return the ids of a prompt for an answer to `messages` that may call `tools`.

        The message texts are the client's; the roles are ours. With `prefill`, which is also the client's, or an
        `opening`, the answer continues from it. `extra` are further variables of the template, with texts of the
        client. `is_plain`: no text spells a control token, where that is already known. With a `scope` the encoder's
        cache is used. Raises TemplateRefused, TextNotEncodable, and TooManyTokens as `Tokenizer.encode` does.
        """
        if not is_plain and self.spells_control_token(messages, tools=tools, prefill=prefill, extra=extra):
            return self.encode_guarded(
                messages, tools=tools, opening=opening, prefill=prefill, extra=extra, max_tokens=max_tokens
            )
        rendered = self._template.render(messages, tools=tools or None, extra=extra)
        rendered += self._closing(rendered, opening, prefill) + opening.text + prefill
        if scope[0] and self._segments is not None and self._segments.is_enabled:
            return self._segments.encode(rendered, scope, max_tokens=max_tokens)
        return self._tokenizer.encode(rendered, max_tokens=max_tokens)

    def encode_guarded(
        self,
        messages: Sequence[Structure],
        *,
        tools: Sequence[Structure] = (),
        opening: Opening = _NO_OPENING,
        prefill: str = "",
        extra: Structure = _NO_EXTRA_VARIABLES,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Encode on the path for texts that spell control tokens. The result is equal for all other texts."""
        broken = [
            {name: value if name == "role" else self._broken(value) for name, value in message.items()}
            for message in messages
        ]
        guarded = {name: self._broken(value) for name, value in extra.items()}
        rendered = self._template.render(broken, tools=[self._broken(tool) for tool in tools] or None, extra=guarded)
        rendered += (
            self._closing(rendered, opening, prefill)
            + opening.before
            + self._broken(opening.name)
            + opening.after
            + self._broken(prefill)
        )
        self._tokenizer.check_fits(rendered, max_tokens)
        parts, end = [], 0
        for match in self._control.finditer(rendered):
            parts += [rendered[end : match.start()].replace(self._marker, ""), self._names[match[0]]]
            end = match.end()
        parts.append(rendered[end:].replace(self._marker, ""))
        with self._building:
            if self._guarded is None:
                self._guarded = _GuardedTokenizer(self._tokenizer, self._tokenizer_json, self._names)
        return self._guarded.encode("".join(parts))

    def _closing(self, rendered: str, opening: Opening, prefill: str) -> str:
        """Return what ends the reasoning that the template has opened, if the answer has begun; "" for nothing."""
        if self._reasoning is None or not (opening.text or prefill.strip()):
            return ""
        opener, closer = self._reasoning
        return f"{closer}\n\n" if rendered.rstrip().endswith(opener) else ""

    def _broken(self, value: Any) -> Any:
        """Return the value with a marker in every control token that its texts spell."""
        if isinstance(value, str):
            return self._control.sub(lambda match: match[0][0] + self._marker + match[0][1:], value)
        if isinstance(value, Mapping):
            return {self._broken(key): self._broken(inner) for key, inner in value.items()}
        return [self._broken(inner) for inner in value] if isinstance(value, list | tuple) else value


class _GuardedTokenizer:
    """A tokenizer with renamed control tokens that returns their original ids."""

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str, new_names: Mapping[str, str]) -> None:
        spec = json.loads(tokenizer_json)
        old_names = {}
        for token in spec["added_tokens"]:
            name = token["content"]
            if name in new_names:
                token["content"], token["normalized"] = new_names[name], False
            old_names[token["content"]] = name
        spec["post_processor"] = None
        ids = {token.content: token_id for token_id, token in tokenizer.added_tokens.items()}
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._backend.no_truncation()
        self._backend.no_padding()
        # a renamed token may have another id, and shift those after it
        self._ids = {
            token_id: ids[old_names[token.content]]
            for token_id, token in self._backend.get_added_tokens_decoder().items()
        }
        self._never = frozenset(ids[name] for name in new_names) - self._ids.keys()

    def encode(self, text: str) -> list[int]:
        token_ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._never.isdisjoint(token_ids):  # the model has the token's text among its ordinary words
            raise TextNotEncodable(
                "a message contains the text of a control token of the model, and the tokenizer has no other "
                "tokens for it"
            )
        return [self._ids.get(token_id, token_id) for token_id in token_ids]
