"""Current settings of a running process, and their followers. Knows no file and no setting.

A change is applied as a whole or not at all: followers first open the resources that it needs, and only when all have
succeeded, all switch. Running work keeps the old settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from pydantic_settings import BaseSettings

from moiety_platform.reloadable import is_live

S = TypeVar("S", bound=BaseSettings)

log = structlog.get_logger(__name__)


class CannotApplySetting(Exception):
    """Valid new settings cannot be applied here; the message says why and what to do."""


async def nothing() -> None:
    """Undo a change that has opened no resources."""


@dataclass(frozen=True, slots=True)
class PreparedChange:
    """Prepared change of a follower: `commit` applies it and cannot fail; `undo` releases the opened resources."""

    commit: Callable[[], None]
    undo: Callable[[], Awaitable[None]] = nothing


Prepare = Callable[[S], Awaitable[PreparedChange]]


@dataclass(frozen=True, slots=True)
class Changes:
    """Names with their values before and after: changes applied at once, and changes that wait for a restart."""

    at_once: Mapping[str, tuple[Any, Any]]
    at_restart: Mapping[str, tuple[Any, Any]]


def changes_between(current: BaseSettings, new: BaseSettings) -> Changes:
    model = type(current)
    changed = {
        name: (getattr(current, name), getattr(new, name))
        for name in model.model_fields
        if getattr(current, name) != getattr(new, name)
    }
    return Changes(
        {name: both for name, both in changed.items() if is_live(model, name)},
        {name: both for name, both in changed.items() if not is_live(model, name)},
    )


class LiveSettings(Generic[S]):
    """Current settings. `now` is replaced, never modified. Owned by the entry point; for one event loop."""

    def __init__(self, now: S) -> None:
        self.now = now
        self._parts: list[tuple[frozenset[str], Prepare[S], bool]] = []
        self._changing = asyncio.Lock()

    def follow(self, names: Iterable[str], use: Callable[[S], None]) -> None:
        """Call `use`, which cannot fail, with the settings when any of these changes."""

        async def prepare(settings: S) -> PreparedChange:
            return PreparedChange(lambda: use(settings))

        self.follow_with(names, prepare)

    def follow_with(self, names: Iterable[str], prepare: Prepare[S], *, reads_files: bool = False) -> None:
        """Call `prepare` when any of these settings changes, to open the resources that they need.

        It may raise CannotApplySetting. With `reads_files` it is called at every change, since it reads files that the
        settings name.
        """
        chosen = frozenset(names)
        unknown = [name for name in chosen if not is_live(type(self.now), name)]
        assert not unknown, f"{unknown} cannot change while the process runs"
        self._parts.append((chosen, prepare, reads_files))

    @property
    def unfollowed(self) -> list[str]:
        """Live settings without a follower, which would be a defect."""
        followed = frozenset[str]().union(*(names for names, _, _ in self._parts))
        model = type(self.now)
        return sorted(name for name in model.model_fields if is_live(model, name) and name not in followed)

    async def change(self, settings: S) -> Changes:
        """Apply the live part of the wanted settings: all of it or, where this raises, nothing."""
        async with self._changing:
            changes = changes_between(self.now, settings)
            taken = self.now.model_copy(update={name: after for name, (_, after) in changes.at_once.items()})
            ready: list[PreparedChange] = []
            try:
                for names, prepare, reads_files in self._parts:
                    if reads_files or not names.isdisjoint(changes.at_once):
                        ready.append(await prepare(taken))
            except BaseException:
                for one in reversed(ready):
                    await one.undo()
                raise
            self.now = taken
            for one in ready:
                one.commit()
            return changes
