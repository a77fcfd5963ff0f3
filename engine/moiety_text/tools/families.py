"""Formats in which model families write their calls."""

from __future__ import annotations

import re

from moiety_text.tools.calls import ArgumentsOnly, CallObject
from moiety_text.tools.reader import MAX_SPACE, CallReader

_SPACE = " \t\n\r"
_MAX_NAME_TEXT = 512  # characters from Mistral's marker to the arguments


class HermesReader(CallReader):
    """Reader of `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the format of Hermes and Qwen."""

    opener = "<tool_call>"
    closer = "</tool_call>"


class LlamaReader(CallReader):
    """Reader of `{"name": …, "parameters": {…}}` at the beginning of the answer, or after `<|python_tag|>`.

    More calls follow a semicolon. There is no other marker, so a JSON object in another format is content.
    """

    opener = "<|python_tag|>"
    separators = ";,"

    def _start(self, text: str) -> str:
        return self._object_after(text, _SPACE)

    def _after(self, text: str) -> str:
        return self._object_after(text, self.separators + _SPACE)

    def _object_after(self, text: str, passed: str) -> str:
        """Open a call, marked or not, if only characters of `passed` precede it."""
        held = self._held + text
        rest = held.lstrip(passed)
        self._held = ""
        is_far = len(held) - len(rest) > MAX_SPACE
        if not is_far and len(rest) < len(self.opener) and self.opener.startswith(rest):
            self._held = held
            return ""
        marker = self.opener if rest.startswith(self.opener) else ""
        if not is_far and (marker or rest.startswith("{")):
            end = len(held) - len(rest) + len(marker)
            self._open(held[:end])
            return held[end:]
        self._step = self._content
        return held


def _beginnings(word: str) -> str:
    return "|".join(re.escape(word[:length]) for length in range(1, len(word)))


_ARGS = r"(?:\[ARGS\]\s*)"
_CALL_ID = r"(?:\[CALL_ID\]\w*)"
_ARGS_SO_FAR = rf"(?:{_ARGS}|{_beginnings('[ARGS]')})"
_NAME_TEXT = re.compile(rf"\s*([A-Za-z0-9_-]+)\s*{_CALL_ID}?{_ARGS}?")
_NAME_TEXT_SO_FAR = re.compile(
    rf"\s*(?:[A-Za-z0-9_-]+\s*(?:{_ARGS_SO_FAR}|{_CALL_ID}{_ARGS_SO_FAR}?|{_beginnings('[CALL_ID]')})?)?"
)


class MistralReader(CallReader):
    """Reader of `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or of later models' format.

    Later models write each call after its own marker: `[TOOL_CALLS]name[ARGS]{…}`, optionally with an id in
    `[CALL_ID]…` before the arguments.
    """

    opener = "[TOOL_CALLS]"
    _is_list = False
    _name_text = ""

    def _open(self, raw: str) -> None:
        super()._open(raw)
        self._is_list, self._name_text = False, ""

    def _lead(self, text: str) -> str:
        character, rest = text[0], text[1:]
        seen = self._name_text + character
        if character == "[" and not self._name_text.strip(_SPACE):
            self._keep(character)
            self._is_list = True
            self._begin(CallObject(self._names))
            return rest
        match = _NAME_TEXT.fullmatch(self._name_text) if character == "{" else None
        if match is not None and match[1] in self._names:
            self._begin(ArgumentsOnly(match[1]))
            return text
        if _NAME_TEXT_SO_FAR.fullmatch(seen) is None or len(seen) > _MAX_NAME_TEXT:
            self._give_up()
            return text
        self._name_text = seen
        self._keep(character)
        return rest

    def _closes(self, behind: str, character: str) -> bool:
        return self._is_list and character == "]" and "]" not in behind

    def _after(self, text: str) -> str:
        """Continue after a call of a list with another call, or the list's end."""
        if not self._is_list:
            return super()._after(text)
        held = self._held + text
        rest = held.lstrip(_SPACE)
        self._held = ""
        if len(held) - len(rest) > MAX_SPACE:
            self._step = self._content
            return held
        if not rest:
            self._held = held
        elif rest[0] == ",":
            before = held[: len(held) - len(rest) + 1]
            super()._open(before)
            if self._raw is not None:
                self._begin(CallObject(self._names))
            return rest[1:]
        else:
            self._step = self._content
            return rest[1:] if rest[0] == "]" else held
        return ""
