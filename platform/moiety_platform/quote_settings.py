"""Settings of quotes."""

from __future__ import annotations

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class QuoteSettings(ProcessSettings):
    """Settings of quotes."""

    quote_ttl_s: float = live(30, "Time for which a quote binds, in seconds.", gt=0, le=3600)
    quote_margin: float = live(
        0.5,
        "Least margin of a quote's guaranteed times over its predicted times, such as 0.5 for half as much again.",
        ge=0,
        le=100,
    )
