"""Gate that holds the arrangement of adapters on a rank until a test opens it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from moiety_engine.model.adapter_modules import rank_factors
from moiety_engine.runner import adapter_loading


class AdapterGate:
    """Gate before the arrangement of adapters, in this process. It opens by itself after two minutes."""

    def __init__(self, *, closed: bool) -> None:
        self._begun, self._opened = threading.Event(), threading.Event()
        if not closed:
            self._opened.set()
        self._arrange = rank_factors
        self._patch = patch.object(adapter_loading, "rank_factors", self._arrange_once_open)

    def __enter__(self) -> Self:
        self._patch.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _exc: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.open()
        self._patch.stop()

    @property
    def is_arranging(self) -> bool:
        """True once the arrangement of an adapter has begun."""
        return self._begun.is_set()

    def open(self) -> None:
        self._opened.set()

    def _arrange_once_open(self, *given: Any) -> Any:
        self._begun.set()
        self._opened.wait(120)
        return self._arrange(*given)
