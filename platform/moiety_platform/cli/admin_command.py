"""Commands over the admin API: each has its own options, and the common ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.option_groups import OptionGroup, as_function, with_option_groups
from moiety_platform.cli.tables import show_row, show_rows

P = ParamSpec("P")

Url = Annotated[
    str | None,
    typer.Option(
        envvar="MOIETY_URL", help="URL of the gateway. If not given, the URL of the moiety serve that uses --data-dir."
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar="MOIETY_ADMIN_KEY",
        help="Admin key. If not given, the admin key of the moiety serve that uses --data-dir.",
    ),
]
DataDir = Annotated[
    Path, typer.Option(envvar="MOIETY_DATA_DIR", help="Data directory of a moiety serve on this machine.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Wide = Annotated[
    bool,
    typer.Option("--wide", help="Show all columns of a table, each on one line, even if the terminal is narrower."),
]


@dataclass(frozen=True)
class Admin(OptionGroup):
    """Common options of admin commands: the gateway to call, and the output format."""

    url: Url = None
    admin_key: AdminKey = None
    data_dir: DataDir = Path(".moiety")
    as_json: AsJson = False
    wide: Wide = False

    @functools.cached_property
    def client(self) -> AdminClient:
        """Return the client, connected at first use, so that errors in the command itself are reported first."""
        return AdminClient.connect(self.url, self.admin_key, self.data_dir)

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.http.close()

    def show_row(self, row: Mapping[str, Any]) -> None:
        show_row(row, self.as_json, wide=self.wide)

    def show_rows(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, str],
        details: Sequence[str] = (),
        prose: Sequence[str] = (),
    ) -> None:
        """Show rows as `tables.show_rows` does, in the format of the common options."""
        show_rows(rows, columns, self.as_json, wide=self.wide, details=details, prose=prose)


def admin_command(function: Callable[Concatenate[Admin, P], None]) -> Callable[..., None]:
    """Turn the function into a command whose first argument comes from the common options, the last in its help."""
    first, *own = inspect.signature(function).parameters.values()
    hints = {**get_type_hints(function, include_extras=True), first.name: Admin}

    def command(**given: Any) -> None:
        admin = given.pop(first.name)
        try:
            function(admin, **given)  # type: ignore[call-arg]
        finally:
            admin.close()

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword, annotation=hints[one.name]) for one in (*own, first)]
    return with_option_groups(as_function(command, function, parameters))
