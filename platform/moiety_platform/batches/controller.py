"""Endpoints of `/v1/batches`. Maps HTTP to the batches.

Every route needs an API key with the inference scope, and sees only the batches of its project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from litestar import Controller, Request, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.batches import service
from moiety_platform.batches.schemas import BatchObject, NewBatch, view
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
SECURITY = [{KEY: list[str]()}]

Limit = Annotated[str | None, whole(f"Largest number of results, {DEFAULT_LIST} if not given.", 1, MAX_LIST)]
MAX_BODY_BYTES = 256 * 1024
MAX_JSON_DEPTH = 8


@dataclass(slots=True)
class BatchServices:
    """Dependencies of these endpoints.

    `on_change` wakes the worker of this process. The two numbers may be changed, with effect on later batches.
    """

    database: Database
    max_open_batches: int
    keep_files_s: int | None  # for result files without a requested expiry; None: until they are deleted
    on_change: Callable[[], None]
    now: Now = now_ms
    bodies: BodyReader = field(
        default_factory=lambda: BodyReader(BodyLimits(MAX_BODY_BYTES, MAX_JSON_DEPTH, DEFAULT_SHAPE))
    )


BatchDependency = NamedDependency[SkipValidation[BatchServices]]


class BatchController(Controller):
    """Routes of batches."""

    path = "/v1/batches"
    tags = ("batches",)
    security = SECURITY

    @post(status_code=200, opt=describes(Described(body={JSON: NewBatch}, errors=(404, 429))))
    async def create_batch(
        self, owner: AuthenticatedClient, batches: BatchDependency, request: Request[Any, Any, Any]
    ) -> BatchObject:
        """Create a batch from the lines of an uploaded file."""
        new = await batches.bodies.read(NewBatch, request.receive, fields_of(request.scope), owner.tenant_id)
        async with batches.database.write() as session:
            max_open, keep_files_s = batches.max_open_batches, batches.keep_files_s
            batch = await service.create_batch(
                session, owner, new, max_open=max_open, keep_files_s=keep_files_s, now=batches.now
            )
        batches.on_change()
        return view(batch)

    @get()
    async def list_batches(
        self, owner: AuthenticatedClient, batches: BatchDependency, limit: Limit = None, after: After = None
    ) -> Listing[BatchObject]:
        """List the project's batches, newest first."""
        wanted = parse_list(limit, after, None, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)
        async with batches.database.read() as session:
            found, has_more = await service.list_batches(session, owner.project_id, wanted)
        return list_fields([view(batch) for batch in found], has_more)

    @get("/{batch_id:str}")
    async def retrieve_batch(
        self, owner: AuthenticatedClient, batches: BatchDependency, batch_id: FromPath[str]
    ) -> BatchObject:
        """Return one batch, with its progress."""
        async with batches.database.read() as session:
            return view(await service.get_batch(session, owner.project_id, batch_id))

    @post("/{batch_id:str}/cancel", status_code=200, opt=fails(409))
    async def cancel_batch(
        self, owner: AuthenticatedClient, batches: BatchDependency, batch_id: FromPath[str]
    ) -> BatchObject:
        """Cancel a batch: no more of its lines are answered."""
        async with batches.database.write() as session:
            batch = await service.cancel_batch(session, owner.project_id, batch_id, batches.now)
        batches.on_change()
        return view(batch)
