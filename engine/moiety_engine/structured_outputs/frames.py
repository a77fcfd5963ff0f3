"""Messages between the core and its grammar processes, as msgpack frames over Unix sockets.

The core requests a fork from the template process by an empty frame with two file descriptors: the child's socket, and
a socket on which the template reports the child's end. The first frame on the child's socket contains the child's role.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from moiety_wire.grammars import GrammarSpec

EXIT_CRASHED = 70  # of a child, after an unexpected exception
EXIT_OUT_OF_MEMORY = 71  # Python could not allocate; native code aborts
MAX_FDS = 4
_HEADER_BYTES = 4
_Message = TypeVar("_Message")


class TemplateReady(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the template process. `problem`: why this tokenizer does not support grammars; "" if it does."""

    num_words: int
    problem: str


class ChildExit(msgspec.Struct, frozen=True, array_like=True):
    """Exit of a child: its wait status, and the processor time that it used, in seconds."""

    status: int
    cpu_s: float


class TrialOrder(msgspec.Struct, frozen=True, tag="trial"):
    """Compile one grammar and its first mask within limits, report, and end."""

    spec: GrammarSpec
    cpu_s: float
    wall_s: float
    memory_bytes: int


class TrialReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of a trial. `refusal`: the reason for the client; "" if the grammar compiles."""

    refusal: str
    cpu_s: float
    memory_bytes: int


class StepperOrder(msgspec.Struct, frozen=True, tag="stepper"):
    """Step grammars until the socket closes. Comes with two descriptors: the mask buffer and the compile socket."""

    memory_bytes: int
    step_cpu_s: float
    num_words: int


class ChildOrder(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a child: its role."""

    role: TrialOrder | StepperOrder


class PrepareOrder(msgspec.Struct, frozen=True, array_like=True):
    """Compile a grammar that has passed its trial, concurrently with the steps."""

    grammar_id: int
    spec: GrammarSpec


class PrepareReport(msgspec.Struct, frozen=True, array_like=True):
    refusal: str
    cpu_s: float


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's row: accept these tokens, then write the mask of the next one. Mask i belongs to row i."""

    state_id: int
    grammar_id: int
    token_ids: list[int]
    is_new: bool


class StepOrder(msgspec.Struct, frozen=True, array_like=True):
    """All rows of one step. `grammars`: grammars of these rows that the process does not have yet."""

    rows: list[StepRow]
    grammars: list[PrepareOrder]
    freed_state_ids: list[int]
    freed_grammar_ids: list[int]


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of a step. `problems`: index of a row, and why its request cannot continue."""

    problems: list[tuple[int, str]]


def send_frame(link: socket.socket, message: object, fds: tuple[int, ...] = ()) -> None:
    """Send one frame, with file descriptors on its first byte. Raises OSError."""
    payload = msgspec.msgpack.encode(message)
    frame = len(payload).to_bytes(_HEADER_BYTES, "little") + payload
    sent = socket.send_fds(link, [frame], fds) if fds else link.send(frame)
    if sent < len(frame):
        link.sendall(frame[sent:])


def receive_frame(link: socket.socket, kind: type[_Message]) -> _Message:
    """Receive one frame. Raises EOFError where the peer is gone, OSError (including TimeoutError)."""
    return _receive_rest(link, b"", kind)


def receive_frame_with_fds(link: socket.socket, kind: type[_Message]) -> tuple[_Message, list[int]]:
    """Receive one frame and the descriptors that came with it, which the caller closes."""
    begun, fds, _, _ = socket.recv_fds(link, _HEADER_BYTES, MAX_FDS)
    return _receive_rest(link, begun, kind), fds


def _receive_rest(link: socket.socket, begun: bytes, kind: type[_Message]) -> _Message:
    header = _receive_exactly(link, _HEADER_BYTES, begun)
    payload = _receive_exactly(link, int.from_bytes(header, "little"), b"")
    return msgspec.msgpack.decode(payload, type=kind)


def _receive_exactly(link: socket.socket, num_bytes: int, begun: bytes) -> bytes:
    parts = begun
    while len(parts) < num_bytes:
        part = link.recv(num_bytes - len(parts))
        if not part:
            raise EOFError("the other process has ended")
        parts += part
    return parts
