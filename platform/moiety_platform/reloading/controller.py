"""`/admin/v1/settings`: a gateway's settings, their origins, and changes of its file that wait for a restart.

The admin router authenticates.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from pydantic_settings import BaseSettings

from moiety_platform.access.table import AdminAction, needs
from moiety_platform.live_settings import LiveSettings
from moiety_platform.reloadable import reload_of
from moiety_platform.reloading.reloader import Reloader
from moiety_platform.reloading.shown import shown
from moiety_platform.reloading.source import SettingsSource

S = TypeVar("S", bound=BaseSettings)


class SettingView(msgspec.Struct, frozen=True):
    """One setting.

    `origin` is option, environment, file or default; `reload` says when a change of the file takes effect. With `waits`
    the file has another value, which needs a restart. Of secrets it shows only whether they are set.
    """

    name: str
    value: Any
    origin: str
    reload: str
    waits: bool


class SettingViews(msgspec.Struct, frozen=True):
    """All settings of this gateway. `problem` says why the current state of its file was not applied."""

    file: str | None
    taken_at: datetime | None
    problem: str
    data: list[SettingView]


def settings_routes(
    source: SettingsSource[S], live: LiveSettings[S], reloader: Reloader[S] | None
) -> list[HTTPRouteHandler]:
    """Return the handlers, for the admin router to register. Without a reloader there is no file."""

    @get(
        "/settings", name="list_settings", tags=["settings"], opt=needs(AdminAction.READ_SETTINGS), sync_to_thread=True
    )
    def list_settings() -> SettingViews:
        """List the settings of the gateway that answers, and the state of its configuration file."""
        standing = None if reloader is None else reloader.standing
        waiting = {} if standing is None else standing.waiting
        now, origin_of = live.now, source.origins()
        return SettingViews(
            None if source.path is None else str(source.path),
            None if standing is None else standing.taken_at,
            "" if standing is None else standing.problem,
            [
                SettingView(
                    name, shown(getattr(now, name)), origin_of(name), reload_of(type(now), name), name in waiting
                )
                for name in type(now).model_fields
            ],
        )

    return [list_settings]
