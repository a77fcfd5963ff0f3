"""Readiness of the object store: it answers, and it is the one of this database.

The database and the store hold the same mark, so that a folder that gateways do not share, a volume that is not
mounted, or the bucket of another deployment is refused before anything is written, read or deleted in it.
"""

from __future__ import annotations

import asyncio
import secrets

import structlog
from sqlalchemy import select, update

from moiety_platform.db.dialect import insert_into
from moiety_platform.db.readiness import CHECK_TIMEOUT_S, ReadinessCheck
from moiety_platform.db.session import Database
from moiety_platform.errors import PlatformError, Unavailable
from moiety_platform.object_storage.models import ObjectStoreRecord
from moiety_platform.object_storage.store import FULL, UNAVAILABLE, ObjectStore

MARK_KEY = "moiety-store-id"
CODES = (UNAVAILABLE, FULL)  # of errors whose cause says what the store has answered
_NAME = "main"

log = structlog.get_logger(__name__)


class ObjectStoreReadiness(ReadinessCheck):
    """Readiness check of the object store, which is also its guard."""

    event = "object_store_not_ready"
    silence = "the object store does not answer yet"

    def __init__(self, database: Database, objects: ObjectStore, *, is_own: bool = False) -> None:
        """Create the check. `is_own` says that both stores are the default ones of one data folder."""
        super().__init__()
        self._is_own = is_own
        self._database = database
        self._objects = objects
        objects.guard = self._require

    async def _require(self) -> None:
        if await self.why_not_ready():  # the reason is for the operator: it is logged, and told by /readyz
            raise Unavailable("the object store is not available; try again shortly", code=UNAVAILABLE, retry_after_s=1)

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await self._compare()
        except (PlatformError, TimeoutError) as error:
            cause = error.__cause__ if isinstance(error, PlatformError) and error.code in CODES else error
            return str(cause).partition("\n")[0] or "the object store does not answer in time"

    async def _compare(self) -> str:
        """Return why the store is not that of the database; empty if it is, or is now."""
        deployment_id, mark = await self._record()
        if mark is None:
            await self._objects.create_mark(MARK_KEY, f"{deployment_id}.{secrets.token_hex(8)}".encode())
        content = await self._objects.read_mark(MARK_KEY)
        found = None if content is None else content.decode("ascii", "replace").strip()
        where = self._objects.name
        if found is not None and found.partition(".")[0] != deployment_id:
            if self._is_own and mark is None:  # the database was lost, and made anew beside its objects
                return await self._keep_lost_objects(found.partition(".")[0])
            return f"{where} belongs to another database: set object_store_url to a folder or a prefix of its own"
        if mark is None and found is None:
            return f"{where} did not keep the object {MARK_KEY}; check that object_store_url allows writing and reading"
        if mark is None and found is not None:
            mark = await self._keep(found)
        if found != mark:
            return (
                f"{where} is not the object store that this database has used so far: mount the folder that all "
                f"gateways share, or set object_store_url to their bucket. If its objects are lost for good, write "
                f"{mark} into the object {MARK_KEY} there"
            )
        return ""

    async def _keep_lost_objects(self, deployment_id: str) -> str:
        """Rename the folder of a lost database, and begin an empty one. Return the reason for another check."""
        kept = await self._objects.rename_folder(deployment_id)
        log.warning("object_store_renamed", deployment_id=deployment_id, folder=str(kept))
        return f"the objects of the lost database {deployment_id} were moved to {kept}"

    async def _record(self) -> tuple[str, str | None]:
        """Return the id of the deployment, made once, and the mark."""
        columns = ObjectStoreRecord.deployment_id, ObjectStoreRecord.mark
        async with self._database.read() as session:
            found = (await session.execute(select(*columns))).first()
        if found is not None:
            return found[0], found[1]
        async with self._database.write() as session:
            row = {"name": _NAME, "deployment_id": secrets.token_hex(16), "mark": None}
            await session.execute(insert_into(session, ObjectStoreRecord).values(row).on_conflict_do_nothing())
            made = (await session.execute(select(*columns))).one()
        return made[0], made[1]

    async def _keep(self, found: str) -> str | None:
        """Record the mark unless another gateway has recorded one; return the recorded one."""
        async with self._database.write() as session:
            unmarked = ObjectStoreRecord.name == _NAME, ObjectStoreRecord.mark.is_(None)
            await session.execute(update(ObjectStoreRecord).where(*unmarked).values(mark=found))
            return await session.scalar(select(ObjectStoreRecord.mark))
