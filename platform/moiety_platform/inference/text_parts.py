"""Content parts that several APIs share: text, and an assistant's refusal of an earlier answer."""

from __future__ import annotations

from typing import Literal

from moiety_platform.inference.body_fields import StrictBody


class TextContent(StrictBody):
    """A text of the user or of an assistant."""

    type: Literal["input_text", "output_text"]
    text: str

    @property
    def readable(self) -> str:
        """The text that the model reads."""
        return self.text


class RefusalContent(StrictBody):
    """An assistant's refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def readable(self) -> str:
        """The text that the model reads."""
        return self.refusal
