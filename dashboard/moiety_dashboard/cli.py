"""`moiety dashboard`: starts Streamlit with our page and theme. The command finds it through an entry point."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from moiety_dashboard.settings import DEFAULT_REFRESH_S, DEFAULT_URL, URL_VARIABLE
from moiety_dashboard.web_server import create_web_app

FOLDER = Path(__file__).parent
SCRIPT = FOLDER / "app.py"
THEME_FILE = FOLDER / ".streamlit" / "config.toml"


def dashboard(
    host: Annotated[str, typer.Option(help="Address at which the dashboard listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port at which the dashboard listens.")] = 8501,
    gateway: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="URL of the gateway.")] = DEFAULT_URL,
    refresh_s: Annotated[
        float, typer.Option(min=0.2, help="Interval between refreshes of a page, in seconds.")
    ] = DEFAULT_REFRESH_S,
    oidc: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="TOML file with the OIDC identity provider in its table `auth`."
        ),
    ] = None,
) -> None:
    """Run the dashboard as a separate process. Users sign in with an administrator's key or an identity provider."""
    from streamlit.web import bootstrap  # noqa: PLC0415  heavy, and only for those who run it

    options = server_options(host, port, oidc)
    bootstrap.load_config_options(options)
    arguments = ["--gateway", gateway, "--refresh-s", str(refresh_s)]
    app = create_web_app(SCRIPT)  # accepts an object as well as the import string of its type hint
    bootstrap.run_asgi_app(str(SCRIPT), app, arguments, options)


def server_options(host: str, port: int, oidc: Path | None = None) -> dict[str, Any]:
    """Return Streamlit's options: local, silent, without telemetry, in our colours."""
    secrets = {} if oidc is None else {"secrets_files": [str(oidc.resolve())]}
    return {
        "server_address": host,
        "server_port": port,
        "server_headless": True,
        "server_fileWatcherType": "none",
        "server_runOnSave": False,
        "browser_gatherUsageStats": False,
        "client_toolbarMode": "minimal",
        "client_disableDataExport": True,  # it does not escape formulas, as a panel's own CSV does
        "client_showErrorDetails": "none",
        **secrets,
        **dict(_flattened(tomllib.loads(THEME_FILE.read_text(encoding="utf-8")))),
    }


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `{"theme": {"light": {"font": …}}}` as Streamlit's flags: theme_light_font."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value
