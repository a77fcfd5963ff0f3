"""Creates, fills, finds and deletes adapters within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from moiety_platform.adapters.models import Adapter, AdapterChunk, AdapterState
from moiety_platform.adapters.schemas import MAX_CONFIG_LENGTH, MAX_PART_BYTES, NAME, NewAdapter
from moiety_platform.adapters.tensors import check_config
from moiety_platform.db.deletion import delete_some
from moiety_platform.db.now import now_ms
from moiety_platform.errors import BadRequest, Conflict, NotFound, TooLarge
from moiety_platform.prices.models import MAX_MODEL_LENGTH
from moiety_platform.tenants.checks import is_id, new_id
from moiety_platform.tenants.service import get_undeleted_tenant

Now = Callable[[], ColumnElement[int]]

MAX_ADAPTERS_PER_TENANT = 1000
ERASE_CHUNKS = 64  # per transaction
_KEY = AdapterChunk.adapter_id, AdapterChunk.start
ABANDONED_MS = 3600 * 1000  # an upload without an addition for this long is abandoned


async def create_adapter(session: AsyncSession, new: NewAdapter) -> Adapter:
    """Create an adapter whose tensors follow, or one that is stored on the engines' hosts.

    Raises BadRequest, NotFound, or Conflict where the name is taken.
    """
    for field, name in (("name", new.name), ("engine_adapter", new.engine_adapter)):
        if name is not None and not NAME.fullmatch(name):
            message = (
                f"'{field}' must have 1 to 64 letters, digits, '.', '_' and '-', and begin with one of the first two"
            )
            raise BadRequest(message, param=field)
    if not (0 < len(new.model) <= MAX_MODEL_LENGTH and new.model.isprintable()):
        raise BadRequest("'model' must be the name of a served model", param="model")
    if (new.config is None) == (new.engine_adapter is None):
        raise BadRequest("send either 'config', before the upload, or 'engine_adapter'", param="config")
    if new.config is not None:
        if len(new.config) > MAX_CONFIG_LENGTH:
            raise BadRequest(f"'config' may have {MAX_CONFIG_LENGTH:,} characters", param="config")
        check_config(new.config)
    tenant = await get_undeleted_tenant(session, new.tenant_id)
    own = select(func.count()).select_from(Adapter).where(Adapter.tenant_id == tenant.id)
    if (await session.scalar(own) or 0) >= MAX_ADAPTERS_PER_TENANT:
        raise Conflict(f"The tenant has {MAX_ADAPTERS_PER_TENANT} adapters; delete some.", code="too_many_adapters")
    moment = int(await session.scalar(select(now_ms())) or 0)
    adapter = Adapter(
        id=new_id("ada"),
        tenant_id=tenant.id,
        model=new.model,
        name=new.name,
        state=AdapterState.UPLOADING if new.engine_adapter is None else AdapterState.READY,
        config=new.config or "",
        num_bytes=0,
        digest=None,
        engine_adapter=new.engine_adapter,
        created_ms=moment,
        touched_ms=moment,
    )
    session.add(adapter)
    try:
        await session.flush()
    except IntegrityError as exc:
        raise Conflict(
            f"The tenant has an adapter {new.name!r} of {new.model!r} already; delete it, or choose another name.",
            code="adapter_exists",
        ) from exc
    return adapter


async def append_part(
    session: AsyncSession, adapter_id: str, start: int, data: bytes, *, max_bytes: int, max_tenant_bytes: int
) -> Adapter:
    """Append a part to an upload. Raises NotFound, Conflict, BadRequest, or TooLarge."""
    adapter = await get_adapter(session, adapter_id, lock=True)
    if adapter.state != AdapterState.UPLOADING:
        raise Conflict("All parts of this adapter have been received; create another one.", code="adapter_complete")
    if start != adapter.num_bytes:
        raise Conflict(f"The next part must begin at {adapter.num_bytes}, not {start}.", code="wrong_start")
    if not 0 < len(data) <= MAX_PART_BYTES:
        raise BadRequest(f"a part must have 1 to {MAX_PART_BYTES:,} bytes, not {len(data):,}", param="data")
    if start + len(data) > max_bytes:
        raise TooLarge(f"an adapter may have {max_bytes:,} bytes; train one of a lower rank, or raise the limit")
    kept = select(func.sum(Adapter.num_bytes)).where(Adapter.tenant_id == adapter.tenant_id)
    if int(await session.scalar(kept) or 0) + len(data) > max_tenant_bytes:
        raise TooLarge(
            f"the tenant's adapters would be larger than {max_tenant_bytes:,} bytes together; delete some",
            code="adapter_storage_full",
        )
    session.add(AdapterChunk(adapter_id=adapter_id, start=start, data=data))
    adapter.num_bytes = start + len(data)
    adapter.touched_ms = int(await session.scalar(select(now_ms())) or 0)
    await session.flush()
    return adapter


async def publish_adapter(session: AsyncSession, adapter_id: str, num_bytes: int, digest: str, key: str) -> Adapter:
    """Make a checked upload of `num_bytes` bytes, stored as the object `key`, ready for use.

    Raises NotFound or Conflict.
    """
    adapter = await get_adapter(session, adapter_id, lock=True)
    if adapter.state != AdapterState.UPLOADING or adapter.num_bytes != num_bytes:
        raise Conflict("Another request changed the adapter; read it again.", code="adapter_changed")
    adapter.state, adapter.digest, adapter.object_key = AdapterState.READY, digest, key
    await session.flush()
    return adapter


async def get_adapter(session: AsyncSession, adapter_id: str, *, lock: bool = False) -> Adapter:
    """Return the adapter. Raises NotFound."""
    living = Adapter.id == adapter_id, Adapter.state != AdapterState.DELETED
    statement = select(Adapter).where(*living)
    if lock:
        statement = statement.with_for_update().execution_options(populate_existing=True)
    found = (await session.scalars(statement)).first() if is_id(adapter_id) else None
    if found is None:
        raise NotFound("There is no adapter with this id; list them with GET /admin/v1/adapters.", param="adapter_id")
    return found


async def list_adapters(
    session: AsyncSession, tenant_id: str | None = None, *, ready: bool = False
) -> Sequence[Adapter]:
    """Return adapters of all tenants, or of one, by tenant, model and name.

    The texts of their configurations are not loaded.
    """
    statement = select(Adapter).options(defer(Adapter.config)).where(Adapter.state != AdapterState.DELETED)
    if tenant_id is not None:
        statement = statement.where(Adapter.tenant_id == tenant_id)
    if ready:
        statement = statement.where(Adapter.state == AdapterState.READY)
    return (await session.scalars(statement.order_by(Adapter.tenant_id, Adapter.model, Adapter.name))).all()


async def delete_adapter(session: AsyncSession, adapter_id: str) -> Adapter:
    """Mark an adapter as deleted: requests cannot use it any more, its name is free, its parts are deleted soon.

    Raises NotFound.
    """
    adapter = await get_adapter(session, adapter_id, lock=True)
    _mark_deleted(adapter)
    await session.flush()
    return adapter


def _mark_deleted(adapter: Adapter) -> None:
    adapter.state = AdapterState.DELETED
    adapter.name = f"~{adapter.id}"  # no valid name begins with `~`; an id that is a valid name could block another


async def lock_erasable(session: AsyncSession, now: Now = now_ms) -> Adapter | None:
    """Lock and return an adapter that is deleted or whose upload was abandoned; None where there is none."""
    moment = int(await session.scalar(select(now())) or 0)
    given_up = (Adapter.state == AdapterState.UPLOADING) & (Adapter.touched_ms < moment - ABANDONED_MS)
    over = select(Adapter).where((Adapter.state == AdapterState.DELETED) | given_up).limit(1)
    adapter = await session.scalar(over.with_for_update(skip_locked=True))
    if adapter is not None and adapter.state != AdapterState.DELETED:
        _mark_deleted(adapter)  # an upload that resumes now must not find only some of its parts
        await session.flush()
    return adapter


async def erase_some(session: AsyncSession, adapter_id: str) -> int:
    """Erase some parts of an adapter, and finally the adapter itself; return the number of rows."""
    num_parts = await delete_some(session, _KEY, AdapterChunk.adapter_id == adapter_id, ERASE_CHUNKS)
    if not num_parts:
        await session.execute(delete(Adapter).where(Adapter.id == adapter_id))
    return num_parts or 1


async def erase_moved_parts(session: AsyncSession) -> int:
    """Erase some parts of adapters whose tensors are an object; return their number."""
    moved = select(Adapter.id).where(Adapter.object_key.is_not(None))
    return await delete_some(session, _KEY, AdapterChunk.adapter_id.in_(moved), ERASE_CHUNKS)


async def read_part(session: AsyncSession, adapter_id: str, start: int) -> bytes:
    """Return the part that begins at `start`; empty at the end."""
    here = AdapterChunk.adapter_id == adapter_id, AdapterChunk.start == start
    return await session.scalar(select(AdapterChunk.data).where(*here)) or b""
