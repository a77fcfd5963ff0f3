"""One model replica: a server process that communicates with gateways and a core process that runs the step loop.

Importing this package imports no torch; only the core's modules do (`model`, `runner`, `sampling`, …), and `LLM`, which
runs both in the calling process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moiety_engine.in_process.llm import LLM as LLM
    from moiety_engine.in_process.sampling_params import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]

_PLACES = {"LLM": "moiety_engine.in_process.llm", "SamplingParams": "moiety_engine.in_process.sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
