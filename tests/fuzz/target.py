"""A target of fuzzing: a function of bytes that returns if input is accepted or refused with a message, and raises
otherwise.

This module does not know the fuzzer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.fuzz.mutations import Mutate

Take = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """`opened` makes what inputs are fed to, once a process; `modules` are those whose branches grammar the fuzzer, and
    half of all mutations are by `mutate` where there is one."""

    name: str
    told: str
    opened: Callable[[], Take]
    modules: tuple[str, ...]
    mutate: Mutate | None = None
    max_bytes: int = 4096


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


def split(data: bytes, num_ways: int) -> tuple[int, bytes]:
    """One of so many ways, by the first byte, so that one corpus serves all of them; and the rest."""
    return (data[0] % num_ways, data[1:]) if data else (0, b"")


def cut(data: bytes, size: int) -> list[bytes]:
    """Return the same bytes in pieces."""
    return [data[at : at + size] for at in range(0, len(data), size)]
