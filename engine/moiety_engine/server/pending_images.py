"""Requests that wait for their images to be decoded, before the core learns of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from moiety_engine.messages import CoreExtend, CoreSubmit

if TYPE_CHECKING:
    from moiety_engine.images.prompt_images import PromptImage
    from moiety_engine.messages import ToCore


@dataclass(slots=True)
class _Pending:
    command: CoreSubmit
    credit_tokens: int
    is_last: bool = False


class PendingImages:
    """Commands for the core that lack their images, by key, with the credit that came meanwhile."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}

    def hold(self, command: CoreSubmit) -> None:
        self._pending[command.key] = _Pending(command, command.credit_tokens)

    def extend(self, key: int, credit_tokens: int, *, last: bool) -> bool:
        """Raise a held request's credit. Return False if it is not held."""
        pending = self._pending.get(key)
        if pending is None:
            return False
        pending.credit_tokens = max(pending.credit_tokens, credit_tokens)
        pending.is_last = pending.is_last or last
        return True

    def leave(self, key: int) -> bool:
        """Drop a held request. Return False if it is not held."""
        return self._pending.pop(key, None) is not None

    def clear(self) -> None:
        """Drop all held requests."""
        self._pending.clear()

    def release(self, key: int, images: list[PromptImage]) -> list[ToCore]:
        """Return the commands that submit a held request with its images."""
        pending = self._pending.pop(key)
        credit = pending.credit_tokens
        commands: list[ToCore] = [msgspec.structs.replace(pending.command, images=images, credit_tokens=credit)]
        if pending.is_last:
            commands.append(CoreExtend(key, credit, last=True))
        return commands
