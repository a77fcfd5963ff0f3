"""Endpoints of `/v1/batches`. Maps HTTP to the batches.

Every route needs an API key with the inference scope, and sees only the batches of its project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from litestar import Request, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import authenticate
from moiety_platform.auth.principal import Principal
from moiety_platform.batches.schemas import BatchObject, NewBatch, view
from moiety_platform.batches.service import cancel_batch, create_batch, get_batch, list_batches
from moiety_platform.db.keyset import After, Listing, list_fields, parse_list
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.files.store import Now
from moiety_platform.inference.request_body import BodyLimits, BodyReader
from moiety_platform.inference.shape_limits import DEFAULT_SHAPE
from moiety_platform.openapi.described import JSON, Described, describes, fails
from moiety_platform.openapi.documents import KEY
from moiety_platform.query_parameters import whole
from moiety_platform.request_head import fields_of

DEFAULT_LIST = 20
MAX_LIST = 100
TAGS = ["batches"]
SECURITY = [{KEY: list[str]()}]

Limit = Annotated[str | None, whole(f"At most so many, {DEFAULT_LIST} if not given.", 1, MAX_LIST)]
MAX_BODY_BYTES = 256 * 1024
MAX_JSON_DEPTH = 8


@dataclass(slots=True)
class BatchServices:
    """Dependencies of these endpoints.

    `on_change` wakes the worker of this process. The two numbers may be changed, with effect on later batches.
    """

    authenticator: Authenticator
    database: Database
    max_open_batches: int
    keep_files_s: int | None  # for result files without a requested expiry; None: until they are deleted
    on_change: Callable[[], None]
    now: Now = now_ms


def batch_routes(services: BatchServices) -> list[HTTPRouteHandler]:
    """Return the handlers of these endpoints."""
    database, bodies = services.database, BodyReader(BodyLimits(MAX_BODY_BYTES, MAX_JSON_DEPTH, DEFAULT_SHAPE))

    async def caller(request: Request[Any, Any, Any]) -> Principal:
        return await authenticate(services.authenticator, request)

    @post(
        "/v1/batches",
        name="create_batch",
        status_code=200,
        tags=TAGS,
        security=SECURITY,
        opt=describes(Described(body={JSON: NewBatch}, errors=(404, 429))),
    )
    async def create(request: Request[Any, Any, Any]) -> BatchObject:
        """Create a batch from the lines of an uploaded file."""
        owner = await caller(request)
        new = await bodies.read(NewBatch, request.receive, fields_of(request.scope), owner.tenant_id)
        async with database.write() as session:
            max_open, keep_files_s = services.max_open_batches, services.keep_files_s
            batch = await create_batch(
                session, owner, new, max_open=max_open, keep_files_s=keep_files_s, now=services.now
            )
        services.on_change()
        return view(batch)

    @get("/v1/batches", name="list_batches", tags=TAGS, security=SECURITY)
    async def list_some(
        request: Request[Any, Any, Any], limit: Limit = None, after: After = None
    ) -> Listing[BatchObject]:
        """List the project's batches, newest first."""
        owner = await caller(request)
        wanted = parse_list(limit, after, None, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)
        async with database.read() as session:
            found, has_more = await list_batches(session, owner.project_id, wanted)
        return list_fields([view(batch) for batch in found], has_more)

    @get("/v1/batches/{batch_id:str}", name="retrieve_batch", tags=TAGS, security=SECURITY)
    async def retrieve(request: Request[Any, Any, Any], batch_id: FromPath[str]) -> BatchObject:
        """Return one batch, with its progress."""
        owner = await caller(request)
        async with database.read() as session:
            return view(await get_batch(session, owner.project_id, batch_id))

    @post(
        "/v1/batches/{batch_id:str}/cancel",
        name="cancel_batch",
        status_code=200,
        tags=TAGS,
        security=SECURITY,
        opt=fails(409),
    )
    async def cancel(request: Request[Any, Any, Any], batch_id: FromPath[str]) -> BatchObject:
        """Cancel a batch: no more of its lines are answered."""
        owner = await caller(request)
        async with database.write() as session:
            batch = await cancel_batch(session, owner.project_id, batch_id, services.now)
        services.on_change()
        return view(batch)

    return [create, list_some, retrieve, cancel]
