"""The settings that a process goes by while it runs, and who follows which of them. Knows no file and no setting.

A change is taken whole or not at all: whoever must open something for it does so first, and only when all have, all go
by it. What has begun goes on by what it began with.
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


class CannotFollow(Exception):
    """New settings that are valid cannot be gone by here; the message says why and what to do."""


async def nothing() -> None:
    """Nothing was opened, so nothing is given up."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A part is ready to go by new settings: `commit` has it do so, and cannot fail; else `undo` gives up what was
    opened for them."""

    commit: Callable[[], None]
    undo: Callable[[], Awaitable[None]] = nothing


Prepare = Callable[[S], Awaitable[Ready]]


@dataclass(frozen=True, slots=True)
class Changes:
    """Names with their values before and after: what is taken at once, and what waits for a restart."""

    at_once: Mapping[str, tuple[Any, Any]]
    at_restart: Mapping[str, tuple[Any, Any]]


def changes_between(now: BaseSettings, wanted: BaseSettings) -> Changes:
    model = type(now)
    changed = {
        name: (getattr(now, name), getattr(wanted, name))
        for name in model.model_fields
        if getattr(now, name) != getattr(wanted, name)
    }
    return Changes(
        {name: both for name, both in changed.items() if is_live(model, name)},
        {name: both for name, both in changed.items() if not is_live(model, name)},
    )


class LiveSettings(Generic[S]):
    """`now` are the settings that hold; replaced, never changed. Owned by the entry point; one event loop."""

    def __init__(self, now: S) -> None:
        self.now = now
        self._parts: list[tuple[frozenset[str], Prepare[S], bool]] = []
        self._changing = asyncio.Lock()

    def follow(self, names: Iterable[str], use: Callable[[S], None]) -> None:
        """Call `use`, which cannot fail, with the settings when any of these changes."""

        async def prepare(wanted: S) -> Ready:
            return Ready(lambda: use(wanted))

        self.follow_with(names, prepare)

    def follow_with(self, names: Iterable[str], prepare: Prepare[S], *, reads_files: bool = False) -> None:
        """Have `prepare`, which may raise CannotFollow, open what the settings need when any of these changes; with
        `reads_files`, which the settings name, whatever changes."""
        chosen = frozenset(names)
        unknown = [name for name in chosen if not is_live(type(self.now), name)]
        assert not unknown, f"{unknown} cannot change while the process runs"
        self._parts.append((chosen, prepare, reads_files))

    @property
    def unfollowed(self) -> list[str]:
        """Live settings that nobody follows, which would be a defect."""
        followed = frozenset[str]().union(*(names for names, _, _ in self._parts))
        model = type(self.now)
        return sorted(name for name in model.model_fields if is_live(model, name) and name not in followed)

    async def change(self, wanted: S) -> Changes:
        """Go by what may change of the wanted settings, all of it or, where this raises, nothing."""
        async with self._changing:
            changes = changes_between(self.now, wanted)
            taken = self.now.model_copy(update={name: after for name, (_, after) in changes.at_once.items()})
            ready: list[Ready] = []
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
