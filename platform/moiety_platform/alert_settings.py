"""Settings of operational alerts."""

from __future__ import annotations

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class AlertSettings(ProcessSettings):
    """Bounds of the conditions that a gateway watches; 0 turns a condition off."""

    alert_engine_down_s: float = live(
        60.0, "Time for which an engine must not respond before webhooks get an alert, in seconds. 0: no alert.", ge=0
    )
    alert_disk_free_percent: float = live(
        5.0,
        "Free space on the disk of the data directory below which webhooks get an alert, in percent. 0: no alert.",
        ge=0,
        le=90,
    )
    alert_slo_burn_rate: float = live(
        14.4,
        "SLO error budget burn rate of a class, over an hour and over five minutes, from which on webhooks get an "
        "alert. 0: no alert.",
        ge=0,
    )
