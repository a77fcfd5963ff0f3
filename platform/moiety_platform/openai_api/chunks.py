"""Server-sent events: the encoded chunks of OpenAI's streamed answers.

The parts that all chunks of a request share are encoded once. A chunk costs the encoding of its text and one join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from moiety_platform.inference.custom_tools import input_of
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun, Usage
from moiety_platform.inference.text_answer import StreamEncoder, WithheldOutput
from moiety_platform.openai_api.answer_types import ChatDelta, CustomToolDelta, FunctionDelta
from moiety_platform.openai_api.answers import AnswerHead, chat_logprobs, echoes_of, head_of, usage_fields
from moiety_platform.openai_api.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.openai_api.text_logprobs import TextOffsets, text_logprobs
from moiety_platform.openai_api.tool_message import MessageForm, new_call_id
from moiety_text.reasoning import AnswerReader
from moiety_text.tools.deltas import CallArguments, CallBegun, CallEnded, Content, Delta, Thinking
from moiety_wire.messages import Finished, TokenLogprob

DONE_DATA = "[DONE]"
DONE = f"data: {DONE_DATA}\n\n".encode()

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """Fields of a stream's chunks besides the text."""

    usage_in_last: bool
    usage_so_far: Callable[[int], Usage] | None = None  # of a choice, in each of its chunks
    ids: TokenIdFeed | None = None
    names_ids: bool = False  # tokens of log probabilities are named by their ids

    @classmethod
    def of(cls, body: GenerationBody, run: InferenceRun) -> ChunkOptions:
        """Return the options that a body asks for."""
        includes_usage = body.include_usage
        return cls(
            includes_usage,
            run.usage_so_far if includes_usage and body.wants_continuous_usage else None,
            TokenIdFeed(run, body.n or 1, withholds_output=body.max_tokens == 0) if body.return_token_ids else None,
            bool(body.return_tokens_as_token_ids),
        )


class TokenIdFeed:
    """Token ids of a stream that no chunk has sent yet. Owned by the encoder of the stream."""

    def __init__(self, run: InferenceRun, num_choices: int, *, withholds_output: bool = False) -> None:
        self._run = run
        self._withholds_output = withholds_output
        self._num_choices = num_choices  # of each prompt
        self._num_sent: dict[int, int] = {}  # by choice

    def prompt_of(self, index: int) -> list[int] | None:
        """Return the ids of a choice's prompt, or None if a chunk of it was sent."""
        return None if index in self._num_sent else self._run.prompts[index // self._num_choices]

    def take(self, index: int) -> list[int]:
        """Return the ids of a choice that came since the last chunk of it."""
        ids = [] if self._withholds_output else self._run.output_ids_of(index)
        new = ids[self._num_sent.get(index, 0) :]
        self._num_sent[index] = len(ids)
        return new


class _ChunkFrame:
    """The encoded parts around a choice that every chunk of a request repeats.

    A chunk ends with `end` where `is_plain`, the common case, and else with `end_of`.
    """

    def __init__(self, head: AnswerHead, kind: str, options: ChunkOptions, *, prompt_in_choice: bool) -> None:
        self.options = options
        self.start = b"data: " + _encode(head.fields(kind))[:-1] + b',"choices":['
        self._usage = b',"usage":null' if options.usage_in_last else b""
        self.end = b"}]" + self._usage + b"}\n\n"
        self.is_plain = options.usage_so_far is None and options.ids is None
        self._prompt_in_choice = prompt_in_choice  # a prompt's ids; else they stand beside the choices

    def end_of(self, index: int) -> bytes:
        """Return the end of choice `index` and its chunk."""
        in_choice, beside, usage = b"", b"", self._usage
        if (feed := self.options.ids) is not None:
            if (prompt_ids := feed.prompt_of(index)) is not None:
                told = b',"prompt_token_ids":' + _encode(prompt_ids)
                in_choice, beside = (told, b"") if self._prompt_in_choice else (b"", told)
            in_choice += b',"token_ids":' + _encode(feed.take(index))
        if self.options.usage_so_far is not None:
            usage = b',"usage":' + _encode(usage_fields(self.options.usage_so_far(index)))
        return b"".join((in_choice, b"}]", beside, usage, b"}\n\n"))

    def end_stream(self, usage: Usage) -> bytes:
        if not self.options.usage_in_last:
            return DONE
        return b"".join((self.start, b'],"usage":', _encode(usage_fields(usage)), b"}\n\n", DONE))


class ChatChunks:
    """Encoder of `chat.completion.chunk` objects."""

    def __init__(self, head: AnswerHead, options: ChunkOptions) -> None:
        self._frame = _ChunkFrame(head, "chat.completion.chunk", options, prompt_in_choice=False)

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":""}', b"null", b"null")

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        frame = self._frame
        if logprobs is None:  # the common case
            return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null%b' % (
                frame.start, index, _encode(text), frame.end if frame.is_plain else frame.end_of(index),
            )  # fmt: skip
        return self._chunk(index, b'{"content":' + _encode(text) + b"}", self._logprobs(logprobs), b"null")

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._chunk(index, b"{}", b"null", _encode(finished.reason.value))

    def end(self, usage: Usage) -> bytes:
        return self._frame.end_stream(usage)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> bytes:
        return _encode(chat_logprobs(logprobs, names_ids=self._frame.options.names_ids))

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        frame = self._frame
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            frame.start, index, delta, logprobs, finish_reason, frame.end if frame.is_plain else frame.end_of(index),
        )  # fmt: skip


class CompletionChunks:
    """Encoder of streamed `text_completion` objects. `echoes` are the texts that the choices begin with."""

    def __init__(self, head: AnswerHead, options: ChunkOptions, echoes: Sequence[str]) -> None:
        self._frame = _ChunkFrame(head, "text_completion", options, prompt_in_choice=True)
        self._echoes = echoes
        self._offsets = [TextOffsets(len(echo)) for echo in echoes]

    def opening(self, index: int) -> bytes:
        return self.piece(index, self._echoes[index], None) if self._echoes[index] else b""

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        encoded = b"null"
        if logprobs is not None:
            names_ids = self._frame.options.names_ids
            encoded = _encode(text_logprobs(logprobs, self._offsets[index], names_ids=names_ids))
        return self._chunk(index, _encode(text), encoded, b"null")

    def closing(self, index: int, finished: Finished) -> bytes:
        return self._chunk(index, b'""', b"null", _encode(finished.reason.value))

    def end(self, usage: Usage) -> bytes:
        return self._frame.end_stream(usage)

    def _chunk(self, index: int, text: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        frame = self._frame
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            frame.start, index, text, logprobs, finish_reason, frame.end if frame.is_plain else frame.end_of(index),
        )  # fmt: skip


class ToolChunks(ChatChunks):
    """Encoder of `chat.completion.chunk` objects of an answer that may contain tool calls or reasoning.

    A call is sent when it is complete. An incomplete call is sent as content, as in an answer that is not streamed.
    """

    def __init__(
        self, head: AnswerHead, options: ChunkOptions, form: MessageForm, readers: Sequence[AnswerReader]
    ) -> None:
        super().__init__(head, options)
        self._form = form
        self._readers = readers
        self._has_called = [False] * len(readers)
        self._custom_arguments: dict[tuple[int, int], str] = {}  # of custom calls that have begun, by choice and call

    def opening(self, index: int) -> bytes:
        return self._chunk(index, b'{"role":"assistant","content":null}', b"null", b"null")  # there may be no content

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return self._chunks(index, self._readers[index].feed(text), logprobs)

    def closing(self, index: int, finished: Finished) -> bytes:
        rest = self._chunks(index, self._readers[index].end(), None)
        reason = self._form.finish_reason_of(finished, self._has_called[index])
        return rest + self._chunk(index, b"{}", b"null", _encode(reason))

    def _chunks(self, index: int, deltas: Sequence[Delta], logprobs: Sequence[TokenLogprob] | None) -> bytes:
        """Return a chunk for each delta that has fields.

        The first chunk has the logprobs, whose text may be held back.
        """
        told = [fields for delta in deltas if (fields := self._fields(index, delta))]
        if not told and logprobs is not None:
            told.append({})
        first = b"null" if logprobs is None else self._logprobs(logprobs)
        return b"".join(
            self._chunk(index, _encode(fields), b"null" if number else first, b"null")
            for number, fields in enumerate(told)
        )

    def _fields(self, index: int, delta: Delta) -> ChatDelta:
        match delta:
            case Content(text):
                return {"content": text}
            case Thinking(text):
                return {"reasoning_content": text, "reasoning": text} if self._form.shows_reasoning else {}
            case CallBegun(number, name):
                self._has_called[index] = True
                return self._begin_call(index, number, name)
            case CallArguments(number, text):
                return self._add_arguments(index, number, text)
            case CallEnded(number):
                return self._end_call(index, number)

    def _begin_call(self, index: int, number: int, name: str) -> ChatDelta:
        if self._form.is_older:
            return {"function_call": {"name": name, "arguments": ""}} if number == 0 else {}
        if name in self._form.custom_names:
            self._custom_arguments[index, number] = ""
            custom: CustomToolDelta = {"name": name, "input": ""}
            return {"tool_calls": [{"index": number, "id": new_call_id(), "type": "custom", "custom": custom}]}
        function: FunctionDelta = {"name": name, "arguments": ""}
        return {"tool_calls": [{"index": number, "id": new_call_id(), "type": "function", "function": function}]}

    def _add_arguments(self, index: int, number: int, text: str) -> ChatDelta:
        if self._form.is_older:
            return {"function_call": {"arguments": text}} if number == 0 else {}
        if (index, number) in self._custom_arguments:  # the input is known when they are complete
            self._custom_arguments[index, number] += text
            return {}
        return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _end_call(self, index: int, number: int) -> ChatDelta:
        arguments = self._custom_arguments.pop((index, number), None)
        if arguments is None:
            return {}
        return {"tool_calls": [{"index": number, "custom": {"input": input_of(arguments)}}]}


async def chat_chunks(body: ChatBody, run: InferenceRun, record: RequestRecord) -> ChatChunks:
    """Return the encoder of a streamed chat answer."""
    head, readers, options = head_of(run, record), run.new_readers(), ChunkOptions.of(body, run)
    return ChatChunks(head, options) if readers is None else ToolChunks(head, options, body.message_form(), readers)


async def completion_chunks(body: CompletionBody, run: InferenceRun, record: RequestRecord) -> StreamEncoder:
    """Return the encoder of streamed text completions."""
    chunks = CompletionChunks(head_of(run, record), ChunkOptions.of(body, run), await echoes_of(body, run))
    return WithheldOutput(chunks) if body.max_tokens == 0 else chunks
