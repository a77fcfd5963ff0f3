"""Settings of the gateway's log, and of the counts of its supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import fixed, live


class LogSettings(ProcessSettings):
    """Level, format and rate of a gateway's log."""

    log_level: Literal["debug", "info", "warning", "error"] = live("info", "Lowest level of log events.")
    log_format: Literal["auto", "json", "console"] = fixed(
        "auto", "Format of the log. auto writes columns on a terminal, otherwise JSON."
    )
    access_log_rate: float = live(
        1.0,
        "Fraction of the successful requests that are logged: 1 logs all, 0 none. Other requests are always logged.",
        ge=0,
        le=1,
    )
    supervisor_status: Path | None = fixed(
        None, "File in which `moiety serve` counts restarts and lost output of its processes, for /metrics."
    )
