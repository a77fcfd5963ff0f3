"""Tool calls and reasoning in messages: `tool_use` and `thinking` blocks, complete or as events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from moiety_platform.anthropic_api.answer_types import AnswerBlock
from moiety_platform.anthropic_api.answers import PING, MessageEvents, MessageHead, event
from moiety_platform.anthropic_api.thinking_signatures import omitted_signature_of, signature_of
from moiety_text.reasoning import AnswerReader
from moiety_text.tools.deltas import Call, CallArguments, CallBegun, Content, Delta, Part, Parts, Thinking, Thought
from moiety_wire.messages import Finished, TokenLogprob


def blocks_of(parts: Parts, *, omits_thinking: bool = False) -> list[AnswerBlock]:
    """Return the content of a message, which has at least one block, if only an empty text block."""
    return [_block_of(part, omits_thinking) for part in parts or [""]]


def _block_of(part: Part, omits_thinking: bool) -> AnswerBlock:
    match part:
        case Thought(text) if omits_thinking:
            return {"type": "thinking", "thinking": "", "signature": omitted_signature_of(text)}
        case Thought(text):
            return {"type": "thinking", "thinking": text, "signature": signature_of(text)}
        case Call(name, arguments):
            return {"type": "tool_use", "id": _new_id(), "name": name, "input": msgspec.Raw(arguments.encode())}
        case _:
            return {"type": "text", "text": part}


class ToolMessageEvents(MessageEvents):
    """Encoder of a streamed answer that may contain tool calls or reasoning.

    Each run of text, the reasoning and each call has its own block. A call is sent when it is complete. An incomplete
    call is sent as text, as in an answer that is not streamed.
    """

    def __init__(self, head: MessageHead, num_prompt_tokens: int, reader: AnswerReader) -> None:
        super().__init__(head, num_prompt_tokens)
        self._reader = reader
        self._num_blocks = 0
        self._open = ""  # type of the open block
        self._has_called = False
        self._thought: list[str] = []  # text of the open block of reasoning

    def opening(self, index: int) -> bytes:
        return self._start() + PING

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return self._to_pieces(self._reader.feed(text))

    def closing(self, index: int, finished: Finished) -> bytes:
        rest = self._to_pieces(self._reader.end())
        if not self._num_blocks:
            rest += self._begin({"type": "text", "text": ""})
        self._stop = self._head.stop_fields(finished, has_called=self._has_called)
        return rest + self._close()

    def _to_pieces(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(map(self._of, deltas))

    def _of(self, delta: Delta) -> bytes:
        match delta:
            case Content(text):
                begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
                return begun + self._delta({"type": "text_delta", "text": text})
            case Thinking(text):
                thought: AnswerBlock = {"type": "thinking", "thinking": "", "signature": ""}
                begun = b"" if self._open == "thinking" else self._begin(thought)
                self._thought.append(text)
                if self._head.omits_thinking:
                    return begun
                return begun + self._delta({"type": "thinking_delta", "thinking": text})
            case CallBegun():
                self._has_called = True
                return self._begin({"type": "tool_use", "id": _new_id(), "name": delta.name, "input": {}})
            case CallArguments():
                return self._delta({"type": "input_json_delta", "partial_json": delta.text})
            case _:
                return self._close()

    def _begin(self, block: AnswerBlock) -> bytes:
        closed = self._close()
        self._num_blocks += 1
        self._open = block["type"]
        return closed + event("content_block_start", {"index": self._num_blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, str]) -> bytes:
        return event("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._sign() if self._open == "thinking" else b""
        self._open = ""
        return signed + event("content_block_stop", {"index": self._num_blocks - 1})

    def _sign(self) -> bytes:
        thought = "".join(self._thought)
        self._thought.clear()
        signature = omitted_signature_of(thought) if self._head.omits_thinking else signature_of(thought)
        return self._delta({"type": "signature_delta", "signature": signature})


def _new_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"
