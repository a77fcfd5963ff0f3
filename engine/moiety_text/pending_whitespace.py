"""White space that a reader holds back, since what follows says whether it belongs to the text.

An answer may have any amount of it. The pieces are joined only once other text follows, so that reading takes time
linear in the length of the answer.
"""

from __future__ import annotations


class HeldSpace:
    """White space behind what a reader holds."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def take(self, text: str, held: str) -> str:
        """Return the text to read now, with the white space before it.

        `held` is what the reader holds. While that and the text are only white space, the result is empty.
        """
        if not text:
            return ""
        if text.isspace() and (self._pieces or held.isspace()):
            self._pieces.append(text)
            return ""
        return self.end() + text

    def end(self) -> str:
        """Return the white space that no text has followed."""
        space = "".join(self._pieces)
        self._pieces.clear()
        return space
