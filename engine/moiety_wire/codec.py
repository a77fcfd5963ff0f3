"""The one codec of the wire: msgpack with tagged unions, one decoder a direction."""

from __future__ import annotations

import msgspec

from moiety_wire.errors import UndecodableMessage
from moiety_wire.messages import ToEngine, ToGateway

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the last two: broken text, deep nesting


def encode(message: ToEngine | ToGateway) -> bytes:
    """One message as msgpack bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes | memoryview) -> ToEngine:
    """A message addressed to an engine. Raises UndecodableMessage."""
    try:
        return _to_engine.decode(data)
    except _UNDECODABLE as exc:
        raise UndecodableMessage(f"not a message to an engine: {exc}") from exc


def decode_to_gateway(data: bytes | memoryview) -> ToGateway:
    """A message addressed to a gateway. Raises UndecodableMessage."""
    try:
        return _to_gateway.decode(data)
    except _UNDECODABLE as exc:
        raise UndecodableMessage(f"not a message to a gateway: {exc}") from exc
