"""Settings of spot classes, after those of quotes."""

from __future__ import annotations

from moiety_platform.quote_settings import QuoteSettings
from moiety_platform.reloadable import live


class SpotSettings(QuoteSettings):
    """Settings of quotes and of spot classes."""

    spot_interval_s: float = live(
        60, "Time for which a spot price is valid, in seconds. Set the same at all gateways.", ge=1, le=86_400
    )
