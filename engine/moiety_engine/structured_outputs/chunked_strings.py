"""Rules of JSON strings with length limits that count in chunks of characters.

The lexer of the grammar library has states for each position of a string that it counts, and 20,000 of them in all.
So a longer string is a sequence of lexemes: a first one with the opening quote, chunks of a fixed number of characters,
and an end with the closing quote. The parser counts the chunks. Every limit shares the first lexeme and the chunks, and
has at most two ends of its own, so the number of states does not depend on how large the limits are.
"""

from __future__ import annotations

from collections.abc import Iterator

CHUNK_CHARS = 128  # masks take longer near the end of a chunk
MANY_LIMITS = 4  # more different limits than these
CHUNK_CHARS_OF_MANY = 64  # have smaller chunks, so that their ends have fewer states
_CONTROL_ESCAPE = r"\\u00([01][0-9a-fA-F]|7[fF])"


class ChunkedStrings:
    r"""Rules of the strings of one grammar. `has_control_escapes`: whether control characters may be `\u` escapes."""

    def __init__(self, num_limits: int, *, has_control_escapes: bool) -> None:
        self.chunk_chars = CHUNK_CHARS if num_limits <= MANY_LIMITS else CHUNK_CHARS_OF_MANY
        escape = rf'\\[nrbtf\\"]{f"|{_CONTROL_ESCAPE}" if has_control_escapes else ""}'
        self.character = rf'({escape}|[^"\\\x00-\x1F\x7F])'  # expression of one character as JSON has it in a string
        self._rules: dict[str, str] = {}

    def string(self, least: int, most: int | None) -> str:
        """Return the text of a rule of strings with `least` to `most` characters, in any number if None."""
        return " | ".join(self._ways(least, most))

    def rules(self) -> list[str]:
        """Return the rules that those of the strings refer to."""
        return [f"{name}: {text}" for name, text in self._rules.items()]

    def _ways(self, least: int, most: int | None) -> Iterator[str]:
        for first, last, least_end, most_end in levels(least, most, self.chunk_chars):
            least_chunks = first
            if first == 0:
                yield self._lexeme(f"string_{least_end}_{most_end}", f'"{self._characters(least_end, most_end)}"')
                least_chunks = 1
            if last is not None and last < least_chunks:
                continue
            begun = self._lexeme("string_first", f'"{self._characters(self.chunk_chars, self.chunk_chars)}')
            end = self._lexeme(f"string_end_{least_end}_{most_end}", f'{self._characters(least_end, most_end)}"')
            yield f"{begun} {self._chunks(least_chunks - 1, None if last is None else last - 1)} {end}"

    def _chunks(self, least: int, most: int | None) -> str:
        if most == 0:
            return ""
        chunk = self._lexeme("string_chunk", self._characters(self.chunk_chars, self.chunk_chars))
        return f"{chunk}{{{least},{'' if most is None else most}}}"

    def _characters(self, least: int, most: int) -> str:
        return f"{self.character}{{{least},{most}}}" if most else ""

    def _lexeme(self, name: str, expression: str) -> str:
        """Return the name of the rule of a lexeme, which is added if it is new."""
        self._rules.setdefault(name.upper(), f"/{expression}/")
        self._rules.setdefault(name, name.upper())
        return name


def levels(least: int, most: int | None, chunk_chars: int) -> Iterator[tuple[int, int | None, int, int]]:
    """Yield ranges of numbers of full chunks, each with the least and the most characters after them."""
    last_end = chunk_chars - 1
    least_chunks, least_end = divmod(least, chunk_chars)
    most_chunks, most_end = (None, last_end) if most is None else divmod(most, chunk_chars)
    if least_chunks == most_chunks:
        if least_end <= most_end:
            yield least_chunks, most_chunks, least_end, most_end
        return
    begin, end = least_chunks, most_chunks
    if least_end > 0:
        yield least_chunks, least_chunks, least_end, last_end
        begin += 1
    if end is not None and most_end < last_end:
        end -= 1
    if end is None or begin <= end:
        yield begin, end, 0, last_end
    if most_chunks is not None and most_end < last_end:
        yield most_chunks, most_chunks, 0, most_end
