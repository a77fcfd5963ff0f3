"""Cached snapshot of the service classes, for the requests of one gateway process."""

from __future__ import annotations

from moiety_platform.classes.service import load_classes
from moiety_platform.classes.terms import Catalogue
from moiety_platform.clock import Clock
from moiety_platform.db.failures import RETRY_AFTER_S
from moiety_platform.db.session import Database
from moiety_platform.db.snapshot import TTL_S, Snapshot
from moiety_platform.errors import Unavailable


class ClassCache(Snapshot[Catalogue]):
    """Snapshot of the classes that expires after `ttl_s` seconds. Owned by the entry point; for one event loop."""

    def __init__(self, database: Database, clock: Clock, *, ttl_s: float = TTL_S) -> None:
        super().__init__("service classes", load_classes, database, clock, ttl_s=ttl_s)

    async def find(self, name: str) -> Catalogue:
        """Return all classes, with `name` among them, which the current snapshot may not have.

        Raises Unavailable when the database is down and was never read, or when there is no such class.
        """
        self.forget()  # another gateway may have just created it
        catalogue = await self.current()
        if name not in catalogue.names:
            raise Unavailable(
                f"The class {name!r} cannot be read from the database right now; retry shortly.",
                code="store_unavailable",
                retry_after_s=RETRY_AFTER_S,
            )
        return catalogue
