"""Values of arguments that are written as plain text, without quotes and escapes, up to a tag after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.argument_rules import ADVICE, NOTES, check_keywords, parts_of_union
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import encode_exactly
from moiety_engine.structured_outputs.lark_text import lark_string, quoted_with_tokens, split_at_token
from moiety_engine.structured_outputs.limited_strings import limited_string
from moiety_engine.structured_outputs.string_expressions import excluding
from moiety_text.tools.argument_types import STRING, ArgumentSchema, typed_argument, types_of_value
from moiety_wire.grammars import ToolCallGrammar

LIMITS = frozenset(["pattern", "format", "minLength", "maxLength"])
MAX_ALTERNATIVES = 4096
_MAX_DEPTH = 16  # of references and alternatives


class TextRules:
    """Rules of text with the tag `end` after it, and then `between`. `padding` encloses text with limits.

    The rule `text_value` is any text with them. `special` are the added tokens with their ids.
    """

    def __init__(self, end: str, special: Mapping[str, int], between: str = "", padding: str = "") -> None:
        self._end, self._special, self._between, self._padding = end, special, between, padding
        self._limited: list[str] = []
        self._num_limited = 0

    def limited(self, part: Mapping[str, Any]) -> str:
        """Return a rule of strings with a pattern, a format or a length. Raises GrammarRefused."""
        name, head = f"limited_{self._num_limited}", split_at_token(self._end, self._special)
        self._num_limited += 1
        self._limited += limited_string(name, part, self._padding, self._end, head)
        rest = "" if head is None else self._quoted(self._end[len(head) :])
        return f"{lark_string(self._padding)} {name} {rest} {self._quoted(self._between)}"

    def value(self, schema: ArgumentSchema, part: Any, *, is_told: bool = False) -> tuple[list[str], list[Any]]:
        """Return rules of texts that a value of a schema may be, and the values that are listed in it.

        `is_told`: the tag before a value tells strings from other values. Raises GrammarRefused.
        """
        if schema.types(part) <= {STRING, "null"}:
            found = plain_texts(schema, part, self._end)
        else:
            found = listed_values(schema, part, self._end, is_told=is_told)
        if found is None:
            return [f"{lark_string(self._padding)} text_value"], []
        if not found:
            raise GrammarRefused(f": no value is allowed here; {ADVICE}")
        if len(found) > MAX_ALTERNATIVES:
            raise GrammarRefused(f"/enum: there are more than {MAX_ALTERNATIVES:,} values; {ADVICE}")
        limits = [one for one in found if isinstance(one, Mapping)]
        return [self.limited(one) for one in limits], [one for one in found if not isinstance(one, Mapping)]

    def input(self, written: str) -> str:
        """Return the rule of a text of a grammar of its own (see `input_grammar`), with the tag after it."""
        head = split_at_token(self._end, self._special)
        rest = "" if head is None else self._quoted(self._end[len(head) :])
        return f"{written} {rest} {self._quoted(self._between)}"

    def input_grammar(self, tool: ToolCallGrammar) -> str:
        """Return the grammar of a tool's input with what ordinary tokens spell of the tag after it.

        Only a terminal can be kept from containing that. Raises GrammarRefused for a grammar with rules.
        """
        head = split_at_token(self._end, self._special)
        after = self._padding + (self._end if head is None else head)
        if not tool.input_terminal:
            if after:
                raise GrammarRefused(f"the input of the tool {tool.name!r} cannot be kept from containing {after!r}")
            return tool.input_grammar
        if head is None:
            end = excluding(self._end)
            rules = f"start: whole\nwhole[lazy]: WHOLE_INPUT {lark_string(after)}\n"
            return f"{rules}WHOLE_INPUT: {tool.input_terminal} & {end}\n{tool.input_grammar}"
        return f"start: WHOLE_INPUT\nWHOLE_INPUT: {tool.input_terminal} {lark_string(after)}\n{tool.input_grammar}"

    def rules(self) -> list[str]:
        """Return the rules of all these texts."""
        end, head = self._end, split_at_token(self._end, self._special)
        between = self._quoted(self._between)
        if head is None:
            return [*self._limited, f"value_end[lazy]: ANY {lark_string(end)}", f"text_value: value_end {between}"]
        if not head:
            return [*self._limited, f"text_value: TEXT? {self._quoted(end)} {between}"]
        rest = self._quoted(end[len(head) :])
        return [
            *self._limited,
            f"value_head[lazy]: ANY {lark_string(head)}",
            f"text_value: value_head+ {rest} {between}",
        ]

    def _quoted(self, text: str) -> str:
        return quoted_with_tokens(text, self._special)


def plain_texts(schema: ArgumentSchema, part: Any, end: str, depth: int = 0) -> list[Any] | None:
    """Return the alternatives of a value that is a string or null; None where it may be any text.

    An alternative is a value, or the schema of strings with limits. Raises GrammarRefused.
    """
    if not isinstance(part, Mapping):
        return None
    if "enum" in part or "const" in part:
        return [_writable(value, end) for value in listed_in(schema, part)]
    parts = parts_of_union(schema, part) if depth < _MAX_DEPTH else None
    if parts is None:
        check_keywords(part, (*NOTES, "type", *LIMITS))
        types = schema.types(part)
        if STRING in types and LIMITS.isdisjoint(part):
            return None
        return [*([part] if STRING in types else []), *([None] if "null" in types else [])]
    found: list[Any] = []
    for one in parts:
        more = plain_texts(schema, one, end, depth + 1)
        if more is None:
            return None
        found += more
    return found


def _writable(value: Any, end: str) -> Any:
    """Return the value. Raises GrammarRefused where its text has the tag that ends it."""
    if end in (text := text_of(value)):
        raise GrammarRefused(f"/enum: {text[:64]!r} contains the tag that ends a value; {ADVICE}")
    return value


def listed_values(schema: ArgumentSchema, part: Any, end: str, *, is_told: bool) -> list[Any] | None:
    """Return all values of a parameter that may be a string or of other types; None where it may be any text.

    `is_told`: the tag before a value tells strings from other values. Raises GrammarRefused.
    """
    free: set[str] = set()
    listed: list[Any] = []
    _collect(schema, part, free, listed, 0)
    types = schema.types(part)
    if STRING in free:
        if types - free - {"null"} and not is_told:
            raise GrammarRefused(
                f": a value that is either any string or one of some other values cannot be told apart; {ADVICE}"
            )
        return None
    if "null" in free:
        listed.append(None)
    if free - {"null"}:
        raise GrammarRefused(f": some strings beside values of other types cannot be told apart; {ADVICE}")
    for value in listed:
        text = text_of(_writable(value, end))
        if not is_told and typed_argument(text, types) != encode_exactly(value):
            raise GrammarRefused(f"/enum: {text[:64]!r} cannot be told from a value of another type; {ADVICE}")
    return listed


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else encode_exactly(value)


def listed_in(schema: ArgumentSchema, part: Mapping[str, Any]) -> list[Any]:
    """Return the values of an `enum` or a `const` that have one of its types. Raises GrammarRefused."""
    check_keywords(part, (*NOTES, "type", "enum", "const"))
    values = [part["const"]] if "const" in part else part["enum"]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise GrammarRefused("/enum: it must be a list")
    if "const" in part and "enum" in part and part["const"] not in part["enum"]:
        raise GrammarRefused("/const: it is not among the values of 'enum'")
    types = schema.types(part)
    return [one for one in values if types & set(types_of_value(one))]


def _collect(schema: ArgumentSchema, part: Any, free: set[str], listed: list[Any], depth: int) -> None:
    """Collect the types of which every value is allowed, and the values that are listed."""
    if not isinstance(part, Mapping):
        free |= schema.types(part)
        return
    if "enum" in part or "const" in part:
        listed += listed_in(schema, part)
        return
    parts = parts_of_union(schema, part) if depth < _MAX_DEPTH else None
    if parts is not None:
        for one in parts:
            _collect(schema, one, free, listed, depth + 1)
        return
    check_keywords(part, (*NOTES, "type"))
    free |= schema.types(part)
