"""Settings of the gateway for requests that count tokens."""

from __future__ import annotations

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live


class TokenCountSettings(ProcessSettings):
    """Limits of requests that count tokens."""

    max_token_counts_per_tenant: int = live(
        64,
        "Largest number of requests of one tenant that this gateway counts tokens of at the same time. Others get 429.",
        ge=1,
    )
