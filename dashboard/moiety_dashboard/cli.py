"""`moiety dashboard`: Streamlit, started on our page with our theme. Found by the command through an entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moiety_dashboard.settings import DEFAULT_REFRESH_S, DEFAULT_URL, URL_VARIABLE

SCRIPT = Path(__file__).parent / "app.py"


def dashboard(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8501,
    gateway: Annotated[str, typer.Option(envvar=URL_VARIABLE, help="The gateway to show.")] = DEFAULT_URL,
    refresh_s: Annotated[float, typer.Option(min=0.2, help="How often the page asks again.")] = DEFAULT_REFRESH_S,
) -> None:
    """Run the dashboard alone. The admin key comes from MOIETY_ADMIN_KEY, or is asked for on the page."""
    from streamlit.web import bootstrap  # noqa: PLC0415  heavy, and only for those who run it

    options = server_options(host, port)
    bootstrap.load_config_options(options)
    arguments = ["--gateway", gateway, "--refresh-s", str(refresh_s)]
    bootstrap.run(str(SCRIPT), False, arguments, options)


def server_options(host: str, port: int) -> dict[str, Any]:
    """Streamlit's options: local, silent, never phoning home, in our colours."""
    return {
        "server_address": host,
        "server_port": port,
        "server_headless": True,
        "server_fileWatcherType": "none",
        "server_runOnSave": False,
        "browser_gatherUsageStats": False,
        "client_toolbarMode": "minimal",
        "client_showErrorDetails": "none",
        **theme_options(),
    }


def theme_options() -> dict[str, Any]:
    colours = {
        "primaryColor": "#0f766e",
        "backgroundColor": "#fbfaf7",
        "secondaryBackgroundColor": "#f1efe9",
        "textColor": "#1c2321",
        "borderColor": "#dcd8ce",
        "dataframeHeaderBackgroundColor": "#f1efe9",
    }
    shape = {"base": "light", "baseRadius": "0.6rem", "showWidgetBorder": True, "font": "sans-serif"}
    return {f"theme_{name}": value for name, value in (colours | shape).items()}
