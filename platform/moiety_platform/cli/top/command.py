"""Command `moiety top`: options, and the loop of the live view."""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.tables import make_console, show_json
from moiety_platform.cli.top.keyboard import keys_of_terminal
from moiety_platform.cli.top.reading import Reader, Report
from moiety_platform.cli.top.view import ViewChoice, screen

POLL_S = 0.1  # how often the screen checks for reports and keys
BETWEEN_S = 1.0  # between the two readings of one report: engines' rates are their difference


@admin_command
def top(
    admin: Admin,
    interval_s: Annotated[float, typer.Option(min=0.5, help="Interval between two updates, in seconds.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one report and exit. This is the default in a pipe and with --json.")
    ] = False,
) -> None:
    """Show the current engines, classes and tenants, refreshed periodically.

    Keys: q quits, tab selects the next table, < and > choose the column to sort by, r reverses the order.
    """
    reader = Reader(admin.client)
    report = reader.read()
    if once or admin.as_json or not sys.stdout.isatty():
        time.sleep(BETWEEN_S)
        report = reader.read()
        if admin.as_json:
            show_json(report.as_json())
        else:
            make_console().print(screen(report, ViewChoice(), None, keys=False))
        return
    watch(reader, report, interval_s)


def watch(reader: Reader, report: Report, interval_s: float) -> None:
    """Show reports until q or Ctrl-C. Errors are shown beside the last report."""
    news: queue.SimpleQueue[Report | CommandError] = queue.SimpleQueue()
    threading.Thread(target=read_on, args=(reader, interval_s, news), name="readings", daemon=True).start()
    console, choice, note, pressed = Console(), ViewChoice(), "", ""
    with keys_of_terminal() as read_keys, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            shown = None
            while "q" not in pressed:
                for key in pressed:
                    choice.press(key)
                while not news.empty():
                    found = news.get()
                    report, note = (found, "") if isinstance(found, Report) else (report, str(found))
                if pressed or shown != (report, note, console.size):
                    shown = report, note, console.size
                    live.update(screen(report, choice, console.height, note), refresh=True)
                pressed = read_keys(POLL_S)
        except KeyboardInterrupt:
            pass


def read_on(reader: Reader, interval_s: float, news: queue.SimpleQueue[Report | CommandError]) -> None:
    """Read endlessly, in a separate thread, so that a slow gateway does not block the keys."""
    while True:
        time.sleep(interval_s)
        try:
            news.put(reader.read())
        except CommandError as error:
            news.put(error)
        except Exception as error:  # last resort of the thread: show it, and try again
            news.put(
                CommandError(f"the gateway's response cannot be shown: {error!r}; run the gateway's release of moiety")
            )
