"""Calls of Mistral models: a list of JSON objects, or later a name and its arguments after each marker."""

from __future__ import annotations

import re

from moiety_text.tools.calls import ArgumentsOnly, CallObject
from moiety_text.tools.formats import CallIdText, ToolFamily, ToolFormat
from moiety_text.tools.history import CallIds
from moiety_text.tools.lists import ListReader

_SPACE = " \t\n\r"
_MAX_NAME_TEXT = 512  # characters from the marker to the arguments


def _beginnings(word: str) -> str:
    return "|".join(re.escape(word[:length]) for length in range(1, len(word)))


_ARGS = r"(?:\[ARGS\]\s*)"
_CALL_ID = r"(?:\[CALL_ID\]\w*)"
_ARGS_SO_FAR = rf"(?:{_ARGS}|{_beginnings('[ARGS]')})"
_NAME_TEXT = re.compile(rf"\s*([A-Za-z0-9_.:/-]+)\s*{_CALL_ID}?{_ARGS}?")
_NAME_TEXT_SO_FAR = re.compile(
    rf"\s*(?:[A-Za-z0-9_.:/-]+\s*(?:{_ARGS_SO_FAR}|{_CALL_ID}{_ARGS_SO_FAR}?|{_beginnings('[CALL_ID]')})?)?"
)


class MistralReader(ListReader):
    """Reader of `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or of later models' format.

    Later models write each call after its own marker: `[TOOL_CALLS]name[ARGS]{…}`, optionally with an id in
    `[CALL_ID]…` before the arguments.
    """

    opener = "[TOOL_CALLS]"
    _name_text = ""

    def _open(self, raw: str) -> None:
        super()._open(raw)
        self._name_text = ""

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


def _format_of(template: str) -> ToolFormat:
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    ids = CallIds.SHORT if "length 9" in template or "length != 9" in template else CallIds.CLIENT
    if "[ARGS]" in template:
        call_id = CallIdText("[CALL_ID]", "[A-Za-z0-9]{9}") if "[CALL_ID]" in template else None
        return ToolFormat(MistralReader, markers, "[TOOL_CALLS]", "[ARGS]", "", call_id=call_id, call_ids=ids)
    to_list = "[TOOL_CALLS] [" if "[TOOL_CALLS] [" in template else "[TOOL_CALLS]["
    return ToolFormat(
        MistralReader,
        markers,
        to_name=to_list + '{"name": "',
        to_arguments='", "arguments":',
        to_end="}",
        between=', {"name": "',
        closer="]",
        call_ids=ids,
    )


MISTRAL = ToolFamily("mistral", lambda template: "[TOOL_CALLS]" in template, _format_of)
