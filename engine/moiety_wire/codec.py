"""Codec of the wire: msgpack with tagged unions, one decoder per direction.

A frame is one message, or an array of several in order: all messages to one peer in one turn go as one frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from moiety_wire.errors import UndecodableMessage
from moiety_wire.messages import ToEngine, ToGateway
from moiety_wire.trace_events import StepNote, StepNotes

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine | list[ToEngine]] = msgspec.msgpack.Decoder(ToEngine | list[ToEngine])
_to_gateway: msgspec.msgpack.Decoder[ToGateway | list[ToGateway]] = msgspec.msgpack.Decoder(ToGateway | list[ToGateway])
_notes = msgspec.msgpack.Decoder(StepNotes)
_ARRAY = struct.Struct(">BI")  # msgpack array header: type byte and number of items
Message = TypeVar("Message")
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the last two: invalid UTF-8, deep nesting


def encode(*messages: ToEngine | ToGateway) -> bytes:
    """Return one frame with the messages, as msgpack bytes.

    Raises OverflowError for integers of more than 64 bits, and UnicodeEncodeError for text that is not Unicode.
    """
    return _encoder.encode(messages[0] if len(messages) == 1 else messages)


def join_in_frames(encoded: Iterable[bytes], max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield messages that are encoded one by one, in order, as frames with their numbers of messages.

    A frame is not much larger than `max_bytes`, except if a single message is.
    """
    parts: list[bytes] = []
    num_bytes = 0
    for part in encoded:
        if parts and num_bytes + len(part) > max_bytes:
            yield _joined(parts), len(parts)
            parts, num_bytes = [], 0
        parts.append(part)
        num_bytes += len(part)
    if parts:
        yield _joined(parts), len(parts)


def _joined(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else b"".join((_ARRAY.pack(0xDD, len(parts)), *parts))


def decode_to_engine(data: bytes | memoryview) -> list[ToEngine]:
    """Return the messages of a frame addressed to an engine. Raises UndecodableMessage."""
    return _decode(_to_engine, data, "an engine")


def decode_to_gateway(data: bytes | memoryview) -> list[ToGateway]:
    """Return the messages of a frame addressed to a gateway. Raises UndecodableMessage."""
    return _decode(_to_gateway, data, "a gateway")


def _decode(
    decoder: msgspec.msgpack.Decoder[Message | list[Message]], data: bytes | memoryview, to: str
) -> list[Message]:
    try:
        found = decoder.decode(data)
    except _UNDECODABLE as exc:
        raise UndecodableMessage(f"not a message to {to}: {exc}") from exc
    return found if isinstance(found, list) else [found]


def encode_step(step: StepNote) -> msgspec.Raw:
    """Return a step in encoded form, to be shared by the notes of all requests that ran in it."""
    return msgspec.Raw(_encoder.encode(step))


def encode_notes(num_seen: int, steps: Sequence[msgspec.Raw]) -> bytes:
    """Return encoded StepNotes for `Finished.steps`."""
    return _encoder.encode((num_seen, steps))


def decode_notes(data: bytes) -> StepNotes:
    """Return the notes in `Finished.steps`. Raises UndecodableMessage."""
    try:
        return _notes.decode(data)
    except _UNDECODABLE as exc:
        raise UndecodableMessage(f"not the notes of a request's steps: {exc}") from exc
