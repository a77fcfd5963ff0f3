"""Settings of spot classes."""

from __future__ import annotations

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class SpotSettings(ProcessSettings):
    """Settings of spot classes."""

    spot_interval_s: float = live(
        60, "Time for which a spot price is valid, in seconds. Set the same at all gateways.", ge=1, le=86_400
    )
