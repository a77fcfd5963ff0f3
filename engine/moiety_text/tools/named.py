"""Base of readers whose calls are a name and then a JSON object, with tags around them."""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from moiety_text.tools.scanning import CallCharacters, expect_tag, take_name, take_object
from moiety_text.tools.sections import SectionReader


class NamedReader(SectionReader):
    """Reader of a name, `name_end`, a JSON object of arguments and `call_end`."""

    name_end: ClassVar[str]
    object_opener: ClassVar[str] = ""  # before the arguments, after white space
    object_end: ClassVar[str] = ""  # after the arguments, after white space
    call_end: ClassVar[str]

    def _scan_call(self, text: CallCharacters) -> Generator[None, str, tuple[str, str]]:
        name = self._known(self._tool_name((yield from take_name(text, self.name_end))))
        yield from expect_tag(text, self.object_opener)
        arguments = yield from take_object(text)
        yield from expect_tag(text, self.object_end)
        yield from expect_tag(text, self.call_end)
        return name, arguments

    def _tool_name(self, name: str) -> str:
        """Return the name of the tool in what the call has as its name."""
        return name
