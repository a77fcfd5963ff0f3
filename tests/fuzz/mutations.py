"""Mutations of decoded values. Parsers refuse nearly all inputs whose bytes are mutated.

The first byte selects the variant of a target (see `split`) and is not mutated."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

Mutate = Callable[[bytes, random.Random], bytes]
DATA = b"data: "
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, -(2**63), 2**64 - 1, 0.5, -0.0, 1e308, "", "0", "é", "\0", "\ud83d"),
    *("<|im_start|>", "auto", "a" * 65, "user", "text", [], [[]], {}, {"type": "text"}, {"": None}),
)
MANY = 300  # places, from which on nothing is repeated so often: it would be again within itself, beyond all memory
HUGE = 10**400  # which JSON may say, and msgpack cannot


def of_json(data: bytes, chance: random.Random) -> bytes:
    return _mutated(data, chance, json.loads, _json, (*ODD, HUGE))


def of_json_lines(data: bytes, chance: random.Random) -> bytes:
    """Mutate one line of JSON lines or of server-sent events."""
    lines = data[1:].split(b"\n")
    at = chance.randrange(len(lines))
    prefix = DATA if lines[at].startswith(DATA) else b""
    lines[at] = prefix + of_json(b"\0" + lines[at][len(prefix) :], chance)[1:]
    if chance.random() < 0.2:
        lines.insert(at, chance.choice(lines))
    return data[:1] + b"\n".join(lines)


def of_msgpack(data: bytes, chance: random.Random) -> bytes:
    return _mutated(data, chance, msgspec.msgpack.decode, msgspec.msgpack.encode, (*ODD[:17], *ODD[18:], b"\xff" * 3))


def _json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=True).encode()


def _mutated(
    data: bytes,
    chance: random.Random,
    decode: Callable[[bytes], Any],
    encode: Callable[[Any], bytes],
    odd: tuple[Any, ...],
) -> bytes:
    """Return the bytes with one to three mutations, or unchanged if they cannot be decoded."""
    try:
        tree = [decode(data[1:])]
        for _ in range(chance.randrange(1, 4)):
            _change(tree, chance, odd)
        return data[:1] + encode(tree[0])
    except (ValueError, TypeError, RecursionError, OverflowError, IndexError, msgspec.MsgspecError):
        return data


def _change(tree: list[Any], chance: random.Random, odd: tuple[Any, ...]) -> None:
    """Replace, remove, repeat or move one of the nodes within a value."""
    places = [(parent, key) for parent in _within(tree) for key in _keys(parent)]
    parent, key = chance.choice(places)
    other, other_key = chance.choice(places)
    match chance.randrange(6):
        case 0 | 1:
            parent[key] = chance.choice(odd)
        case 2:
            parent[key] = other[other_key]
        case 3 if parent is not tree:
            del parent[key]
        case 4 if isinstance(parent, list) and parent is not tree:
            parent.extend([parent[key]] * chance.choice((1, 2, 300 if len(places) < MANY else 3)))
        case 5 if isinstance(parent, dict):
            parent[str(other_key)] = chance.choice(odd)
        case _:
            parent[key] = [parent[key]]


def _within(tree: list[Any]) -> list[Any]:
    found: list[Any] = []
    waiting: list[Any] = [tree]
    while waiting and len(found) < 2000:
        node = waiting.pop()
        found.append(node)
        waiting += [one for one in (node.values() if isinstance(node, dict) else node) if isinstance(one, (dict, list))]
    return found


def _keys(node: Any) -> list[Any]:
    return list(node) if isinstance(node, dict) else list(range(len(node)))
