"""Messages between a gateway and the processes of Python guardrails, sent as frames of `moiety_limited_processes`."""

from __future__ import annotations

import msgspec


class GuardrailTemplateReady(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a template process. `error` says why it has no check."""

    error: str = ""


class CheckOrder(msgspec.Struct, frozen=True, array_like=True):
    """Check one text, report, and end. `request` is the JSON object that HTTP endpoints get too."""

    request: bytes
    wall_s: float
    memory_bytes: int


class CheckReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of an order: whether the text may pass, or the kind of the exception that the check has raised."""

    allow: bool
    error: str = ""
