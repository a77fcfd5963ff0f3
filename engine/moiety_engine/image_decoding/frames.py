"""Messages between the engine server and its image processes, sent as frames of `moiety_limited_processes`."""

from __future__ import annotations

import msgspec


class ImageTemplateReady(msgspec.Struct, frozen=True, array_like=True):
    """First frame of the template process."""


class DecodeOrder(msgspec.Struct, frozen=True, array_like=True):
    """Decode one image, resize it to this size, report, and end."""

    data: bytes
    size: tuple[int, int]  # width and height that the head of the file says
    resized: tuple[int, int]
    cpu_s: float
    wall_s: float
    memory_bytes: int


class DecodeReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of an order: RGB values row by row, or the reason of a refusal for the client."""

    refusal: str
    width: int = 0
    height: int = 0
    pixels: bytes = b""
