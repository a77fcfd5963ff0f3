"""Cached snapshot of the prices, for the requests of one gateway process."""

from __future__ import annotations

from moiety_platform.clock import Clock
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S, Snapshot
from moiety_platform.prices.service import load_prices
from moiety_platform.prices.token_cost import PriceList


class PriceCache(Snapshot[PriceList]):
    """Snapshot of the prices that expires after `ttl_s` seconds. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("prices", load_prices, database, clock, ttl_s=ttl_s)
