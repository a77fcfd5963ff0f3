"""Incremental reader of answers in the Harmony format.

The channel `analysis` is reasoning, `final` is content, and so is `commentary` (a preamble for the user) unless it is
addressed to a tool. A message to one of the callable tools is a call if its body is a JSON object; otherwise its body
is read by its channel. Text that is in no message is content. Control tokens come as their own text; text that only
spells one is guarded (see `guarded`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from moiety_text.tools.calls import ArgumentsOnly
from moiety_text.tools.deltas import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Delta,
    Part,
    Thinking,
    assemble,
)
from moiety_text.tools.json_scanner import scan_whole
from moiety_text.tools.reader import overlap

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
CONTROL_TOKENS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
FUNCTIONS = "functions."  # namespace of the client's tools
ANALYSIS, COMMENTARY = "analysis", "commentary"
BETWEEN_MESSAGES = "\n\n"  # between two messages that become one text

MAX_HEADER = 512  # characters
_ENDS = (END, CALL, RETURN)
_CONTROL = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """Header of a message."""

    channel: str
    recipient: str  # "": the user

    @classmethod
    def of(cls, text: str) -> MessageHeader:
        """Parse the text between two messages, control tokens included."""
        role, _, rest = text.rpartition(START)[2].partition(CHANNEL)
        named = _RECIPIENT.search(_CONTROL.sub(" ", rest)) or _RECIPIENT.search(_CONTROL.sub(" ", role))
        words = _CONTROL.sub(" ", rest).split()
        return cls(words[0] if words else "", "" if named is None else named[1])


class HarmonyReader:
    """Reader of one answer, from the end of the prompt's `<|start|>assistant`. Owned by the answer's consumer."""

    def __init__(self, names: Collection[str] = (), max_calls: int | None = None) -> None:
        """Create the reader.

        `names` are the callable tools. Calls beyond `max_calls` are left out, with everything after them.
        """
        self._names = names
        self._max_calls = max_calls
        self._held = ""  # the end of the text, if it may begin a control token
        self._header = ""  # text since the last message
        self._body: MessageHeader | None = None  # header of the message that is being read
        self._is_loose = False  # in text that belongs to no message
        self._call: list[str] | None = None  # body of a message to a tool
        self._num_calls = 0
        self._was: type[Content | Thinking] | None = None  # kind of the last text
        self._is_new = False  # the message has no text yet
        self._deltas: list[Delta] = []

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas of more text."""
        held, self._held = self._held + text, ""
        at = 0
        for match in _CONTROL.finditer(held):
            self._text(held[at : match.start()])
            self._control(match[0])
            at = match.end()
        rest = held[at:]
        certain = len(rest) - max(overlap(rest, token) for token in CONTROL_TOKENS)
        self._text(rest[:certain])
        self._held = rest[certain:]
        return self._taken()

    def end(self) -> list[Delta]:
        """Return the remaining deltas at the end of the text. A header without its message is left out."""
        held, self._held = self._held, ""
        self._text(held)
        if self._body is not None:
            self._end_message()
        elif self._header.strip(_SPACE) and not _is_header(self._header):
            self._give(Content, self._header)
        self._header = ""
        return self._taken()

    def read(self, text: str) -> list[Part]:
        """Return the parts of a whole answer."""
        return assemble([*self.feed(text), *self.end()])

    def _control(self, token: str) -> None:
        if self._body is not None:
            if token in _ENDS:
                self._end_message()
            elif token in (START, CHANNEL):  # the model has left out the end
                self._end_message()
                self._header = token
            return
        if token == MESSAGE:
            self._begin_message()
        elif token in _ENDS:
            self._header, self._is_loose = "", False
        elif self._is_loose or token == START:  # what stands before the start of a message is not its header
            self._header, self._is_loose = token, False
        elif len(self._header) <= MAX_HEADER:
            self._header += token

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._call is not None:
            self._call.append(text)
        elif self._body is not None:
            self._give(Thinking if self._body.channel == ANALYSIS else Content, text)
        elif self._is_loose:
            self._give(Content, text)
        else:
            self._header += text
            if not _may_be_header(self._header):
                text, self._header, self._is_loose = self._header, "", True
                self._is_new = True
                self._give(Content, text)

    def _begin_message(self) -> None:
        header = MessageHeader.of(self._header)
        self._body, self._header, self._is_new, self._is_loose = header, "", True, False
        if header.recipient.removeprefix(FUNCTIONS) in self._names:
            self._call = []

    def _end_message(self) -> None:
        header, body = self._body, self._call
        assert header is not None, "a message has begun"
        self._call = None
        if body is not None and not self._is_over:
            text = "".join(body)
            if (arguments := _arguments_of(text)) is not None:
                name, index = header.recipient.removeprefix(FUNCTIONS), self._num_calls
                self._num_calls += 1
                self._was = None
                self._deltas += [CallBegun(index, name), CallArguments(index, arguments), CallEnded(index)]
            else:
                self._text(text)
        self._body = None

    @property
    def _is_over(self) -> bool:
        """True after the last call that the client wants."""
        return self._max_calls is not None and self._num_calls >= self._max_calls

    def _give(self, kind: type[Content | Thinking], text: str) -> None:
        if self._is_over:
            return
        if self._is_new and self._was is kind:
            text = BETWEEN_MESSAGES + text
        self._is_new, self._was = False, kind
        self._deltas.append(kind(text))

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


def _may_be_header(text: str) -> bool:
    """Return whether text outside of messages is a header or its beginning, and not text for the user."""
    if len(text) > MAX_HEADER:
        return False
    return "to=".startswith(text.lstrip(_SPACE)) or _is_header(text)


def _is_header(text: str) -> bool:
    return text.lstrip(_SPACE).startswith((START, CHANNEL, CONSTRAIN, "to="))


def _arguments_of(body: str) -> str | None:
    """Return the JSON object that is a call's body, white space around it left out; None for any other text."""
    return scan_whole(ArgumentsOnly(""), body.strip(_SPACE))
