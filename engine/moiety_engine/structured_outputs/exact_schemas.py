"""JSON schemas rewritten so that the grammar library keeps them exactly; the rest is refused with its place.

Every document that a rewritten schema admits satisfies the client's schema. Some satisfying documents are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import unquote

import msgspec

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import decode_exactly, pointer_part, with_exact_numbers
from moiety_engine.structured_outputs.exclusive_bounds import ExclusiveBounds
from moiety_engine.structured_outputs.formats import PATTERNS
from moiety_engine.structured_outputs.large_repetitions import check_lengths, check_repetitions
from moiety_engine.structured_outputs.patterns import exact_name_pattern, exact_pattern

MAX_COEFFICIENT = 2**32 - 1  # limit of a multiple in the library
MAX_POINTER_CHARS = 200
ESCAPES = 'nrbtf\\"'  # letters after a backslash in strings, without the numeric escapes
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07", "draft/2019-09")
_MERGING = ("allOf", "anyOf", "oneOf", "$ref")


@dataclass(frozen=True, slots=True)
class ExactSchema:
    """A schema for the library, and the escapes that its strings may contain; None for all escapes."""

    schema: dict[str, Any]
    allowed_escapes: str | None

    def options(self, **more: Any) -> dict[str, Any]:
        """Return the options of the library for this schema."""
        escapes = {} if self.allowed_escapes is None else {"json_allowed_escapes": self.allowed_escapes}
        return {"lenient": False, "coerce_one_of": False, **escapes, **more}

    def encode(self, **options: Any) -> str:
        """Return the schema as JSON, with options within it if there are any."""
        return msgspec.json.encode(self.schema | ({"x-guidance": options} if options else {})).decode()


def exact_schema_of(text: str) -> ExactSchema:
    """Return the exact schema of a JSON text.

    Raises GrammarRefused, and ValueError and RecursionError if the text is not a schema.
    """
    return exact_schema(decode_exactly(text))


def exact_schema(decoded: Any) -> ExactSchema:
    """Return the exact schema of a schema decoded by `decode_exactly`.

    Raises GrammarRefused with the JSON pointer of the unsupported part.
    """
    if isinstance(decoded, bool):
        decoded = {} if decoded else {"enum": []}
    if not isinstance(decoded, dict):
        raise GrammarRefused("a JSON schema must be an object")
    _check_text(decoded, "")
    check_references(decoded)
    rewriting = _SchemaRewrite(_is_old(decoded))
    found = rewriting.rewrite(with_exact_numbers(decoded), "")
    rewriting.check_multiples()
    rewriting.check_bounds()
    return ExactSchema(found, ESCAPES if rewriting.has_free_names else None)


@dataclass(slots=True)
class _SchemaRewrite:
    """One pass over a schema."""

    is_old: bool  # written for a draft before 2020-12
    has_free_names: bool = False  # besides names with a schema of their own
    has_merged: bool = False  # schemas that apply to one value together
    multiples: dict[Decimal, str] = field(default_factory=dict)  # with a pointer to one occurrence each
    bounds: ExclusiveBounds = field(default_factory=ExclusiveBounds)

    def rewrite(self, schema: Any, pointer: str) -> Any:
        if isinstance(schema, list):
            return [self.rewrite(one, f"{pointer}/{at}") for at, one in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        found: dict[str, Any] = {}
        for key, value in schema.items():
            at = f"{pointer}/{pointer_part(key)}"
            if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
                found[key] = {name: self.rewrite(one, f"{at}/{pointer_part(name)}") for name, one in value.items()}
            elif key in _DATA:
                found[key] = value
            else:
                found[key] = self.rewrite(value, at)
        self.has_merged = self.has_merged or any(key in found for key in _MERGING)
        for key in _COUNTS:
            if isinstance(count := found.get(key), float) and count.is_integer():
                found[key] = int(count)  # 2.0 is a whole number in JSON Schema
        self._check_keywords(found, pointer)
        self._note_names(found)
        _rewrite_strings(found, pointer)
        if found.get("uniqueItems") is False:
            del found["uniqueItems"]  # the default, which the library refuses when it is explicit
        return found

    def _check_keywords(self, schema: Mapping[str, Any], pointer: str) -> None:
        if "x-guidance" in schema:
            raise _refused(f"{pointer}/x-guidance", "options of the grammar library are not supported", "leave it out")
        if "additionalItems" in schema and not isinstance(schema.get("items"), list) and "prefixItems" in schema:
            message = "it has no effect together with 'prefixItems'", "use 'items' for the elements after them"
            raise _refused(f"{pointer}/additionalItems", *message)
        if "prefixItems" in schema and (self.is_old or isinstance(schema.get("items"), list)):
            message = "it is a keyword of draft 2020-12, but this schema uses an older draft", "use one draft"
            raise _refused(f"{pointer}/prefixItems", *message)
        required = schema.get("required", [])
        if not isinstance(required, bool) and not (  # a boolean, of draft 3, is refused by the library
            isinstance(required, list) and all(isinstance(one, str) for one in required)
        ):
            raise _refused(f"{pointer}/required", "it must be a list of strings", "list names of properties")
        self._check_least_properties(schema, pointer)
        if (unkept := self.bounds.note(schema, pointer)) is not None:
            raise _refused_bound(unkept)
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            self._note_multiple(multiple, f"{pointer}/multipleOf")

    @staticmethod
    def _check_least_properties(schema: Mapping[str, Any], pointer: str) -> None:
        """Refuse `minProperties` where free property names could repeat, which count once."""
        least, required = schema.get("minProperties"), schema.get("required")
        if not isinstance(least, int) or (schema.get("additionalProperties") is False and not _named(schema)):
            return
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        if least - num_required > 1:
            message = f"more than one property beyond the {num_required} in 'required' could have any name"
            raise _refused(f"{pointer}/minProperties", message, "list them in 'required', or lower the number")

    def _note_names(self, schema: Mapping[str, Any]) -> None:
        """Note whether free names occur beside named properties.

        An escaped spelling of a named property could then pass as a free name.
        """
        has_names = any(schema.get(key) for key in ("properties", "patternProperties", "required"))
        self.has_free_names = self.has_free_names or (has_names and schema.get("additionalProperties") is not False)

    def _note_multiple(self, multiple: int | float, pointer: str) -> None:
        exact = abs(Decimal(repr(multiple)))
        if exact == 0:
            raise _refused(pointer, "multipleOf must not be 0", "use a number above 0")
        if _as_the_library_reads(float(multiple)) != exact:
            message = f"multiples of {multiple} are not computed exactly"
            raise _refused(pointer, message, "use a number with fewer digits, or an integer of a smaller unit")
        self.multiples.setdefault(exact, pointer)

    def check_bounds(self) -> None:
        """Refuse exclusive bounds that the library does not keep when it merges subschemas."""
        if self.has_merged and (unkept := self.bounds.find_unkept()) is not None:
            raise _refused_bound(unkept)

    def check_multiples(self) -> None:
        """Refuse multiples whose common multiples overflow: the library computes them in 32 bits."""
        if not self.has_merged or len(self.multiples) < 2:
            return
        digits = max(0, *(-int(one.as_tuple().exponent) for one in self.multiples))
        coefficients = [int(one.scaleb(digits)) for one in self.multiples]
        if lcm(*coefficients) * max(coefficients) > MAX_COEFFICIENT or 10**digits > MAX_COEFFICIENT:
            message = "its common multiples with other multipleOf values of this schema are not computed exactly"
            raise _refused(next(reversed(self.multiples.values())), message, "use smaller or fewer different numbers")


def _rewrite_strings(schema: dict[str, Any], pointer: str) -> None:
    """Replace formats by patterns where the library is looser than validators, and make patterns exact.

    An exact pattern means the same in every dialect.
    """
    pattern, name = schema.get("pattern"), schema.get("format")
    if isinstance(pattern, str):
        try:
            schema["pattern"] = exact_pattern(pattern)
            check_repetitions(schema["pattern"], pattern)
        except GrammarRefused as exc:
            raise GrammarRefused(f"{pointer[:MAX_POINTER_CHARS]}/pattern: {exc}") from exc
    check_lengths(schema, pointer[:MAX_POINTER_CHARS])
    by_name = schema.get("patternProperties")
    if isinstance(by_name, Mapping):
        schema["patternProperties"] = dict(_with_exact_names(by_name, f"{pointer}/patternProperties"))
    if isinstance(name, str) and name in PATTERNS:
        del schema["format"]
        if "pattern" in schema:
            also = schema.get("allOf")
            schema["allOf"] = [*(also if isinstance(also, list) else ()), {"pattern": PATTERNS[name]}]
        else:
            schema["pattern"] = PATTERNS[name]


def _with_exact_names(schemas: Mapping[str, Any], pointer: str) -> Iterable[tuple[str, Any]]:
    for pattern, schema in schemas.items():
        try:
            yield exact_name_pattern(pattern), schema
        except GrammarRefused as exc:
            raise GrammarRefused(f"{pointer[:MAX_POINTER_CHARS]}/{pointer_part(pattern)[:64]}: {exc}") from exc


def _as_the_library_reads(multiple: float) -> Decimal | None:
    """Return a multiple as the library reads it; None where the library refuses it.

    The library moves the decimal point until no digits follow it.
    """
    value, digits = abs(multiple), 0
    while value % 1 != 0:
        value, digits = value * 10.0, digits + 1
    return Decimal(int(value)).scaleb(-digits) if value <= MAX_COEFFICIENT else None


def _named(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("patternProperties"))


def _is_old(schema: Mapping[str, Any]) -> bool:
    draft = schema.get("$schema")
    return isinstance(draft, str) and any(old in draft for old in _OLD_DRAFTS)


def _check_text(value: Any, pointer: str) -> None:
    """Refuse half of a surrogate pair, which is not a character. Raises GrammarRefused."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise _refused(pointer, "it contains half of a surrogate pair", "send valid Unicode") from exc
    elif isinstance(value, Mapping):
        for key, one in value.items():
            at = f"{pointer}/{pointer_part(key).encode(errors='replace').decode()}"
            _check_text(key, at)
            _check_text(one, at)
    elif isinstance(value, list):
        for at_index, one in enumerate(value):
            _check_text(one, f"{pointer}/{at_index}")


def check_references(root: Mapping[str, Any]) -> None:
    """Refuse a schema that refers to itself for the same value, which has no meaning. Raises GrammarRefused."""
    is_done: dict[int, bool] = {}  # by schema; False while it is being followed

    def follow(schema: Any, pointer: str) -> None:
        if not isinstance(schema, Mapping) or is_done.get(id(schema)):
            return
        if id(schema) in is_done:
            message = "no document can satisfy it, because it refers to itself for the same value"
            raise _refused(pointer, message, "move the reference into a property or an item")
        is_done[id(schema)] = False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            follow(_resolved(root, reference), f"{pointer}/$ref")
        also = schema.get("allOf")
        for at, one in enumerate(also if isinstance(also, list) else ()):
            follow(one, f"{pointer}/allOf/{at}")
        is_done[id(schema)] = True

    waiting: list[tuple[Any, str]] = [(root, "")]
    while waiting:
        value, pointer = waiting.pop()
        if isinstance(value, Mapping):
            follow(value, pointer)
            waiting += [(one, f"{pointer}/{pointer_part(key)}") for key, one in value.items() if key not in _DATA]
        elif isinstance(value, list):
            waiting += [(one, f"{pointer}/{at}") for at, one in enumerate(value)]


def _resolved(root: Mapping[str, Any], reference: str) -> Any:
    """Return the target of a reference within the schema; None if there is none or it is no JSON pointer."""
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _refused_bound(pointer: str) -> GrammarRefused:
    message = "an exclusive bound is not supported with an opposite bound that is less than 1 away"
    return _refused(pointer, message, "use an inclusive bound with a fraction, such as 0.001 for a number above 0")


def _refused(pointer: str, why: str, advice: str) -> GrammarRefused:
    return GrammarRefused(f"{pointer[:MAX_POINTER_CHARS]}: {why}; {advice}")
