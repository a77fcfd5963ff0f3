"""The classes as the requests of one gateway process see them."""

from __future__ import annotations

from moiety_platform.classes.service import load_classes
from moiety_platform.classes.terms import Catalogue
from moiety_platform.clock import Clock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S, Snapshot
from moiety_platform.errors import Unavailable


class ClassCache(Snapshot[Catalogue]):
    """Owned by the entry point; one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("service classes", load_classes, database, clock, ttl_s=ttl_s)

    async def get(self, name: str) -> Catalogue:
        """All classes, and `name` among them if there is such a class. Raises Unavailable when the database is away and
        was never read, or when the class is nowhere to be found."""
        catalogue = await self.current()
        if name in catalogue:
            return catalogue
        self.forget()  # it was made a moment ago, at another gateway
        catalogue = await self.current()
        if name not in catalogue:
            raise Unavailable(
                f"The class {name!r} cannot be looked up right now; try again shortly.",
                code="store_unavailable",
                retry_after_s=RETRY_AFTER_S,
            )
        return catalogue
