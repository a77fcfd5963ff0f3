"""Calls of Llama 3 and 4: JSON objects that are the whole answer, or follow `<|python_tag|>`."""

from __future__ import annotations

from moiety_text.tools.formats import ToolFamily, ToolFormat
from moiety_text.tools.reader import MAX_SPACE, CallReader

_SPACE = " \t\n\r"
_HEADS = ("<|start_header_id|>", "<|header_start|>")  # of a turn, with Llama 3 and 4


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


def _is_of(template: str) -> bool:
    return '{"name": "' in template and '"parameters": ' in template and any(head in template for head in _HEADS)


def _format_of(template: str) -> ToolFormat:
    return ToolFormat(
        LlamaReader,
        ("<|python_tag|>",),
        to_name='{"name": "',
        to_arguments='", "parameters":',
        to_end="}",
        between='; {"name": "',
        marks_calls=False,
        one_call_a_message="single tool-calls" in template,
    )


LLAMA_JSON = ToolFamily("llama3_json", _is_of, _format_of)
