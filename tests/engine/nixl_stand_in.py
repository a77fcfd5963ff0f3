"""Stand-in for the package `nixl`: agents in one process that copy memory, with the calls that the engine makes.

An agent that is in `gone` has ended: reads of its memory fail. Where `holds` is set, reads do not end.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

Ranges = list[tuple[int, int]]


class BackendError(Exception):
    """Error of the library, as its own ones derived from Exception only."""


class Agent:
    """An agent; `registered` has its memory."""

    everyone: ClassVar[dict[str, Agent]] = {}
    gone: ClassVar[set[str]] = set()
    holds: ClassVar[bool] = False

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        assert config["backends"] == ["UCX"] and not config["enable_prog_thread"]
        assert config["sync_mode"] == "strict"
        self.name, self.backends = name, {"UCX": 1}
        self.registered: Ranges = []
        self.known: set[str] = set()
        self.num_open = 0  # reads that were not released
        self.everyone[name] = self

    def register_memory(self, memory: Any) -> tuple[int, int]:
        place = memory.data_ptr(), memory.data_ptr() + len(memory)
        self.registered.append(place)
        return place

    def deregister_memory(self, place: tuple[int, int]) -> None:
        self.registered.remove(place)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if metadata.decode() not in self.everyone:
            raise BackendError("unknown agent")
        self.known.add(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, ranges: Sequence[tuple[int, int, int]], kind: str) -> Ranges:
        assert kind == "DRAM"
        return [(address, address + size) for address, size, _ in ranges]

    def initialize_xfer(self, what: str, own: Ranges, other: Ranges, name: str) -> SimpleNamespace:
        assert what == "READ" and name in self.known
        self._require(own)
        self.everyone[name]._require(other)
        self.num_open += 1
        return SimpleNamespace(name=name, own=own, other=other)

    def transfer(self, handle: SimpleNamespace) -> str:
        if handle.name in self.gone:
            raise BackendError("disconnected")
        for (begin, end), (other, _) in zip(handle.own, handle.other, strict=True):
            ctypes.memmove(begin, other, end - begin)
        return "PROC"

    def check_xfer_state(self, handle: SimpleNamespace) -> str:
        return "ERR" if handle.name in self.gone else "PROC" if self.holds else "DONE"

    def release_xfer_handle(self, handle: SimpleNamespace) -> None:
        if self.holds:
            raise BackendError("under way")
        self.num_open -= 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def _require(self, ranges: Ranges) -> None:
        for begin, end in ranges:
            if not any(first <= begin and end <= last for first, last in self.registered):
                raise BackendError("not registered")


def stand_in() -> SimpleNamespace:
    """Return what stands for the package, without agents of earlier tests."""
    Agent.everyone, Agent.gone, Agent.holds = {}, set(), False
    return SimpleNamespace(
        _bindings=SimpleNamespace(BackendError=BackendError),
        nixl_agent=Agent,
        nixl_agent_config=dict,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT="strict"),
    )


@contextlib.contextmanager
def nixl_or_stand_in() -> Iterator[None]:
    """Let the stand-in be imported where the package is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("nixl") is None:
            patch.setitem(sys.modules, "nixl", stand_in())
        yield
