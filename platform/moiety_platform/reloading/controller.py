"""`/admin/v1/settings`: a gateway's settings, their origins, and changes of its file that wait for a restart.

The admin router authenticates.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.views import READ_SETTINGS
from moiety_platform.live_settings import LiveSettings
from moiety_platform.reloadable import reload_of
from moiety_platform.reloading.reloader import Reloader
from moiety_platform.reloading.shown import shown
from moiety_platform.reloading.source import SettingsSource


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


class SettingController(Controller):
    """Route of the settings. Without a reloader there is no file."""

    path = "/settings"
    tags = ("settings",)

    @get(opt=needs(READ_SETTINGS), sync_to_thread=True)
    def list_settings(
        self,
        source: NamedDependency[SkipValidation[SettingsSource[Any]]],
        live: NamedDependency[SkipValidation[LiveSettings[Any]]],
        reloader: NamedDependency[SkipValidation[Reloader[Any] | None]],
    ) -> SettingViews:
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
