"""Profile hook that reports the Python calls of one thread. Knows no package."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import CodeType, FrameType
from typing import Self


class CallProfile(ABC):
    """Hook of the thread that enters it, until it is left."""

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.note_call(frame.f_code)

    @abstractmethod
    def note_call(self, code: CodeType) -> None:
        """Note a call of a Python function."""
