"""Calls of Llama 4 and LFM2 as Python: a list of function calls with keyword arguments."""

from __future__ import annotations

from collections.abc import Generator

from moiety_text.tools.formats import NotedArguments, ToolFamily, ToolFormat
from moiety_text.tools.json_scanner import Malformed
from moiety_text.tools.python_values import take_python_value
from moiety_text.tools.reader import MAX_SPACE
from moiety_text.tools.scanning import MAX_NAME_CHARS, SPACE, CallCharacters, ScannedCall, take_name, take_past_space
from moiety_text.tools.sections import SectionReader
from moiety_text.tools.tagged import json_object_of


class PythonicReader(SectionReader):
    """Reader of `[f(a=1, b="x"), g()]` at the beginning of the answer, or after `<|python_start|>`."""

    opener = "<|python_start|>"
    closer = "<|python_end|>"

    def _start(self, text: str) -> str:
        space, rest = self._after_space(text)
        is_far = len(space) > MAX_SPACE
        if not rest and not is_far:
            self._held = space
            return ""
        if rest.startswith("[") and not is_far:
            self._open(space)
            return rest
        self._step = self._content
        return space + rest

    def _lead(self, text: str) -> str:
        self._begin(ScannedCall(self._scan_first))
        return text

    def _scan_first(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        if (yield from take_past_space(text)) != "[":
            raise Malformed
        return (yield from self._scan_call(text))

    def _scan_next(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        return (yield from self._scan_call(text))

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        name = self._known((yield from take_name(text, "(")))
        arguments: dict[str, str] = {}
        while (character := (yield from take_past_space(text))) != ")":
            if arguments:
                if character != ",":
                    raise Malformed
                character = yield from take_past_space(text)
                if character == ")":
                    break
            key = ""
            while character != "=":
                key += character
                if len(key) > MAX_NAME_CHARS:
                    raise Malformed
                character = yield from text.take()
            arguments[key.strip(SPACE)] = yield from take_python_value(text)
        return name, json_object_of(arguments)

    def _after(self, text: str) -> str:
        """Continue after a call with another one of the list, or with its end."""
        space, rest = self._after_space(text)
        if not rest and len(space) <= MAX_SPACE:
            self._held = space
            return ""
        if rest.startswith(","):
            self._open(space + ",")
            if self._raw is not None:
                self._begin(ScannedCall(self._scan_next))
            return rest[1:]
        self._owes_closer, self._step = True, self._content
        return rest[1:] if rest.startswith("]") else space + rest


class Lfm2Reader(PythonicReader):
    """Reader of `<|tool_call_start|>[f(a=1)]<|tool_call_end|>`."""

    opener = "<|tool_call_start|>"
    closer = "<|tool_call_end|>"

    def _start(self, text: str) -> str:
        self._step = self._content
        return text


def _new_format(reader: type[PythonicReader], to_name: str, closer: str, *, marks_calls: bool = True) -> ToolFormat:
    return ToolFormat(
        reader,
        (reader.opener, reader.closer),
        to_name=to_name,
        to_arguments="(",
        to_end=")",
        between=", ",
        closer=closer,
        marks_calls=marks_calls,
        parameters=NotedArguments("keywords"),
    )


LLAMA4_PYTHONIC = ToolFamily(
    "llama4_pythonic",
    lambda template: "func_name1(param" in template,
    lambda template: _new_format(PythonicReader, "[", "]", marks_calls=False),
)
LFM2 = ToolFamily(
    "lfm2",
    lambda template: Lfm2Reader.opener in template,
    lambda template: _new_format(Lfm2Reader, f"{Lfm2Reader.opener}[", f"]{Lfm2Reader.closer}"),
)
