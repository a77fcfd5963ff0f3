"""Random JSON schemas, and documents close to what a schema allows."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from hypothesis import strategies as st
from tests.schema_oracle import read_decimal, write_json

NAMES = ("a", "b", "é", "x y", 'q"', "a/b", "", "longer")
WORDS = (
    *("", "a", "ab", "é", "😀", 'say "hi"', "back\\slash", "\n\t", "\u2028", "\x7f", "𝒳y", "0", "null"),
    *("<tool_call>", "a/b", "AB-123"),
)
PATTERNS = (
    *("^[A-Z]{2,4}-[0-9]{3}$", "a", "^a", "b$", r"^\d+$", r"^\w{1,3}$", "^.{2}$", r"\s", r"^\S+$", "^(foo|bar)$"),
    *("^foo|bar$", "^[^a]*$", r"\u00e9", '["\\\\]', r"^\W$", r"^\D{2}$", "^a/b$", r"^[\s\S]{1,2}$", "^$", "(?:ab)+"),
    *(r"^a\.b$", r"^[\d\-]{2}$", r"^\p{L}+$", "(?i)^a$", r"^\t$", r"^[\w.]+@", r"^\x41$", "a\\\\$", r"^[\^$]$"),
    *("^[a&&b]$", "^[[:ab]$", "^{a}$", r"^[^\W\d]$"),
)
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "duration", "uri")
MULTIPLES = tuple(map(Decimal, ("0.1", "0.01", "0.5", "0.25", "0.07", "1.5", "2.5", "0.001", "100.0", "0.3", "3.3")))
small = st.integers(-20, 20)
integers = st.one_of(small, st.integers(-(10**6), 10**6), st.sampled_from([2**31, 2**53 - 1, 1 - 2**53, 10**15]))
numbers = st.one_of(
    integers,
    st.decimals(-1000, 1000, places=2),
    st.decimals(-5, 5, places=4),
    st.sampled_from([Decimal(one) for one in ("0.1", "1e-7", "-0.5", "1e10", "0.001", "123456.789", "-0.0")]),
)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.sampled_from(WORDS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)),
    max_leaves=4,
)


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def joined(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {key: one for part in found for key, one in part.items()})


number_schemas = joined(
    st.sampled_from([{"type": "number"}, {"type": "integer"}, {"type": ["number", "string"]}, {}]),
    some(
        minimum=numbers,
        maximum=numbers,
        exclusiveMinimum=numbers,
        exclusiveMaximum=numbers,
        multipleOf=st.one_of(st.integers(1, 30), st.sampled_from(MULTIPLES)),
    ),
)
string_schemas = joined(
    st.just({"type": "string"}),
    some(
        minLength=st.integers(0, 4),
        maxLength=st.integers(2, 40),
        pattern=st.sampled_from(PATTERNS),
        format=st.sampled_from(FORMATS),
    ),
)
fixed_schemas = st.one_of(
    values.map(lambda value: {"const": value}),
    st.lists(values, min_size=1, max_size=4).map(lambda found: {"enum": found}),
    joined(
        st.lists(numbers, min_size=1, max_size=4).map(lambda found: {"enum": found}),
        some(minimum=small, multipleOf=st.integers(1, 5), type=st.just("integer")),
    ),
    joined(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(lambda found: {"enum": found}),
        some(minLength=st.integers(0, 3), pattern=st.sampled_from(PATTERNS), type=st.just("string")),
    ),
)
leaf_schemas = st.one_of(
    number_schemas,
    string_schemas,
    fixed_schemas,
    st.sampled_from([{}, True, False, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "object"}]),
    st.sampled_from([{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/tree"}]),
)


def inner_schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = joined(
        st.sampled_from([{"type": "object"}, {"type": "object"}, {}]),
        some(
            properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
            required=st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
            additionalProperties=st.one_of(st.just(False), inner),
            patternProperties=st.dictionaries(st.sampled_from(PATTERNS[:12]), inner, max_size=2),
            minProperties=st.integers(0, 3),
            maxProperties=st.integers(0, 4),
        ),
    )
    arrays = joined(
        st.sampled_from([{"type": "array"}, {"type": "array"}, {}]),
        some(
            items=inner,
            prefixItems=st.lists(inner, min_size=1, max_size=3),
            minItems=st.integers(0, 3),
            maxItems=st.integers(0, 4),
        ),
    )
    parts = st.lists(inner, min_size=1, max_size=3)
    combined = st.one_of(*(st.fixed_dictionaries({key: parts}) for key in ("anyOf", "oneOf", "allOf")))
    return st.one_of(objects, arrays, combined, joined(combined, objects), joined(combined, number_schemas))


def with_definitions(found: tuple[Any, Any, Any]) -> str:
    root, leaf, tree = found
    named = {"$defs": {"leaf": leaf, "tree": tree}}
    return write_json((root if isinstance(root, dict) else {"allOf": [root]}) | named)


tree_schemas = st.recursive(leaf_schemas, inner_schemas, max_leaves=8)
schemas = st.one_of(
    st.one_of(number_schemas, string_schemas, fixed_schemas).map(write_json),
    st.tuples(tree_schemas, leaf_schemas, tree_schemas).map(with_definitions),
)
STRINGS = (
    *("".join(one) for size in range(3) for one in itertools.product("abé\n1_\u2028 ", repeat=size)),
    *WORDS,
    *("foo", "bar", "foox", "xbar", "ABCDE-123", "\t", "\x01", "\u00a0", "\ufeff", "\x85", "\r", "\x1c", "٣", "a.b"),
    *("axb", "-1", "1-", "^", "$", "a\\", "\u212a", "&", ":", "[", "{a}", "2024-02-30", "2024-02-29", "2023-02-29"),
    *("0000-01-01", "12:00:60Z", "12:00:00", "2024-01-01T00:00:00Z", "::1", "1:2:3:4:5:6:7::", "::ffff:1.2.3.4"),
    *("1.2.3.4", "1.2.3.256", "01.2.3.4", "P1Y", "PT1S", "P1W", "P1WT1S", "P", "P1Y1D", "a@b", "a@b.c", "a..b@c"),
    *("a" * 63, "a" * 64 + ".b", "a-.b", "-a", "a_b", "xn--a", "ab--cd.com", "a.", "http://a", "a:", "http://a b"),
    *("http://[::1]", "//a", "urn:x", "http://a:99999999/", "http://%zz", "00000000-0000-0000-0000-000000000000"),
)
NUMERALS = (
    *("0", "-0", "0.0", "-0.0", "1", "-1", "0.1", "0.10", "1.0", "1e0", "1e1", "10", "100", "1e-1", "0.3", "0.30"),
    *("0.07", "0.14", "0.49", "1.5", "3.0", "7", "21", str(2**53 - 1), str(2**53), str(-(2**53) - 1), "1e400"),
    *("1.000000000000000000001", "0.000000000000000001", "1e-7", "0.0000001", "2.50"),
)


class Written(str):
    """The text of a number in a document."""


def numerals_near(schema: str) -> list[str]:
    """Return the numbers in a schema and numbers near them, as texts."""
    found = set(NUMERALS)
    for match in re.finditer(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?", schema):
        one = Decimal(match[0])
        tenth, little = Decimal("0.1"), Decimal("1e-9")
        near = (one, one + 1, one - 1, one + tenth, one - tenth, one * 2, one * 3, -one, one + little, one - little)
        found |= {format(number, "f") for number in near} | {f"{one:e}"}
    return sorted(found)


def written(value: Any) -> str:
    if isinstance(value, Written):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{written(name)}:{written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], draw: random.Random, numerals: list[str]) -> Any:
    """Return the value with another value at the path."""
    if path and isinstance(value, dict):
        return {key: replaced(one, path[1:], draw, numerals) if key == path[0] else one for key, one in value.items()}
    if path:
        return [replaced(one, path[1:], draw, numerals) if at == path[0] else one for at, one in enumerate(value)]
    number, string = Written(draw.choice(numerals)), draw.choice(STRINGS)
    if draw.random() < 0.2:
        return draw.choice([None, True, {}, [], number, string])
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if draw.random() < 0.8}
        return kept | ({draw.choice(NAMES): draw.choice([number, string])} if draw.random() < 0.5 else {})
    if isinstance(value, list):
        return value[:-1] if draw.random() < 0.5 else [*value, draw.choice([number, string])]
    return string if isinstance(value, str) else number


def documents_near(schema: str, drawn: list[str], draw: random.Random) -> list[str]:
    numerals = numerals_near(schema)
    bases = [json.loads(one, parse_float=read_decimal) for one in drawn] or [{}]
    found = [*numerals, *(written(one) for one in draw.sample(STRINGS, 30))]
    for _ in range(40):
        base = draw.choice(bases)
        found.append(written(replaced(base, draw.choice(list(places(base))), draw, numerals)))
    return found
