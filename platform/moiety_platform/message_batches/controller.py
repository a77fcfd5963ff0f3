"""Anthropic's Message Batches: endpoints under `/v1/messages/batches`.

They are batches of `/v1/messages`, in the same tables and by the same workers as those of `/v1/batches`, and each API
shows those of the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from litestar import Controller, Request, Router, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, QueryParameter, SkipValidation
from litestar.response import Stream
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.anthropic_api.errors import (
    AnthropicErrorBody,
    answer_anthropic_error,
    answer_unexpected_anthropic,
)
from moiety_platform.auth.client import AuthenticatedClient, owner_of_request
from moiety_platform.auth.principal import Principal
from moiety_platform.batches.assembly import Batches
from moiety_platform.batches.controller import BatchServices
from moiety_platform.batches.deletion import delete_batch
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.models import OPEN, Batch, BatchLine, LineState
from moiety_platform.batches.schemas import COMPLETION_WINDOW, NewBatch
from moiety_platform.batches.service import cancel_batch, create_batch, get_batch
from moiety_platform.controllers import with_services
from moiety_platform.db.keyset import ListRequest, read_list
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound, PlatformError
from moiety_platform.fast_path import OWN_BODY_LIMIT
from moiety_platform.files.models import StoredFile
from moiety_platform.files.service import Files
from moiety_platform.files.upload import Uploads
from moiety_platform.inference.request_body import read_body
from moiety_platform.known_parameters import IGNORED, SENT_BY_BETA_CLIENTS
from moiety_platform.message_batches.objects import (
    BATCHES_PATH,
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchPage,
    MessageBatchResult,
    NewMessageBatch,
    input_file_of,
    message_batch,
    results_of,
)
from moiety_platform.message_batches.tenant_locks import TenantLocks
from moiety_platform.openapi.described import JSON, Described, describes
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.openapi.headers import MESSAGES_REQUEST_ID
from moiety_platform.query_parameters import parse_whole, whole
from moiety_platform.request_head import MESSAGES_PATH, api_key_authorization, fields_of

DEFAULT_PAGE = 20
MAX_PAGE = 1000
BODY_FACTOR = 8  # a batch's body may have so many times the bytes of a request's
INPUT_NAME = "message_batch.jsonl"
JSONL = "application/x-jsonl"

Limit = Annotated[str | None, whole(f"Largest number of results, {DEFAULT_PAGE} if not given.", 1, MAX_PAGE)]
BeforeId = Annotated[str | None, QueryParameter(description="The id of the batch after the page.")]
AfterId = Annotated[str | None, QueryParameter(description="The id of the batch before the page.")]


def _described(**more: Any) -> dict[str, Any]:
    described = Described(error=AnthropicErrorBody, answer_headers=(MESSAGES_REQUEST_ID,), **more)
    return describes(described) | {IGNORED: SENT_BY_BETA_CLIENTS}


@dataclass(frozen=True, slots=True)
class MessageBatchServices:
    """Dependencies of these endpoints."""

    database: Database
    batches: BatchServices  # with the bounds of batches
    uploads: Uploads
    files: Files
    limits: Callable[[], BatchLineLimits]  # of requests
    turns: TenantLocks = field(default_factory=TenantLocks)  # of new batches, whose bodies are large

    async def find(self, session: AsyncSession, owner: Principal, batch_id: str) -> Batch:
        """Return a batch of messages of the caller's project. Raises NotFound."""
        batch = await get_batch(session, owner.project_id, batch_id)
        if batch.endpoint != MESSAGES_PATH:
            raise NotFound(
                f"the batch {batch_id!r} is for {batch.endpoint}; use /v1/batches for it", code="batch_not_found"
            )
        return batch

    async def has_own_input(self, session: AsyncSession, batch: Batch) -> bool:
        """Return whether the batch's input file was made for it, and not uploaded."""
        name = await session.scalar(select(StoredFile.filename).where(StoredFile.id == batch.input_file_id))
        return name == INPUT_NAME


async def views_of(session: AsyncSession, batches: Sequence[Batch]) -> list[MessageBatch]:
    """Return batches in Anthropic's fields."""
    ended = [batch.id for batch in batches if batch.status not in OPEN and batch.failed]
    # lines that were not answered have no owner: closing has ended them
    unanswered = BatchLine.state == LineState.FAILED, BatchLine.owner.is_(None)
    counts = select(BatchLine.batch_id, func.count()).where(BatchLine.batch_id.in_(ended), *unanswered)
    rows = await session.execute(counts.group_by(BatchLine.batch_id)) if ended else ()
    found: dict[str, int] = {row[0]: row[1] for row in rows}
    return [message_batch(batch, found.get(batch.id, 0)) for batch in batches]


def parse_page(
    owner: AuthenticatedClient, limit: Limit = None, before_id: BeforeId = None, after_id: AfterId = None
) -> ListRequest:
    """Return the page that a client's query parameters request. Raises BadRequest."""
    most = DEFAULT_PAGE if limit is None else parse_whole(limit, "limit")
    if not 1 <= most <= MAX_PAGE:
        raise BadRequest(f"'limit' must be between 1 and {MAX_PAGE:,}, not {most}", param="limit")
    if before_id is not None and after_id is not None:
        raise BadRequest("'before_id' and 'after_id' exclude each other; send only one", param="before_id")
    return ListRequest(most, before_id or after_id, newest_first=before_id is None)


MessageBatchDependency = NamedDependency[SkipValidation[MessageBatchServices]]


class MessageBatchController(Controller):
    """Routes of Message Batches."""

    path = BATCHES_PATH
    tags = ("batches",)
    security = tuple({name: list[str]()} for name in (ANTHROPIC_KEY, KEY))
    exception_handlers = {  # noqa: RUF012  read by the framework only
        PlatformError: answer_anthropic_error,
        Exception: answer_unexpected_anthropic,
    }

    @post(status_code=200, opt=_described(body={JSON: NewMessageBatch}, errors=(429,)) | {OWN_BODY_LIMIT: True})
    async def create_message_batch(
        self, owner: AuthenticatedClient, message_batches: MessageBatchDependency, request: Request[Any, Any, Any]
    ) -> MessageBatch:
        """Create a batch of messages, which are answered when there is room."""
        limits, bounds = message_batches.limits(), message_batches.batches
        length = fields_of(request.scope).get(b"content-length", b"")

        async def create(session: AsyncSession, file: StoredFile) -> Batch:
            new = NewBatch(input_file_id=file.id, endpoint=MESSAGES_PATH, completion_window=COMPLETION_WINDOW)
            return await create_batch(
                session,
                owner,
                new,
                max_open=bounds.max_open_batches,
                keep_files_s=bounds.keep_files_s,
                num_checked=num_lines,
                now=bounds.now,
            )

        async with message_batches.turns.of(owner.tenant_id):
            data = await read_body(request.receive, length, BODY_FACTOR * limits.max_line_bytes)
            content, num_lines = await asyncio.to_thread(input_file_of, data, limits)
            batch = await message_batches.uploads.store_content(owner, INPUT_NAME, content, create)
        bounds.on_change()
        return message_batch(batch, 0)

    @get(opt=_described(), dependencies={"list_request": Provide(parse_page, sync_to_thread=False)})
    async def list_message_batches(
        self,
        owner: AuthenticatedClient,
        message_batches: MessageBatchDependency,
        list_request: NamedDependency[SkipValidation[ListRequest]],
    ) -> MessageBatchPage:
        """List the project's batches of messages, newest first."""
        own = select(Batch).where(Batch.project_id == owner.project_id, Batch.endpoint == MESSAGES_PATH)
        async with message_batches.database.read() as session:
            found, has_more = await read_list(session, own, list_request, Batch.created_ms, Batch.id)
            data = await views_of(session, found if list_request.newest_first else found[::-1])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"data": data, "has_more": has_more, "first_id": first, "last_id": last}

    @get("/{message_batch_id:str}", opt=_described())
    async def retrieve_message_batch(
        self, owner: AuthenticatedClient, message_batches: MessageBatchDependency, message_batch_id: FromPath[str]
    ) -> MessageBatch:
        """Return one batch, with its progress."""
        async with message_batches.database.read() as session:
            batch = await message_batches.find(session, owner, message_batch_id)
            return (await views_of(session, [batch]))[0]

    @post("/{message_batch_id:str}/cancel", status_code=200, opt=_described(errors=(409,)))
    async def cancel_message_batch(
        self, owner: AuthenticatedClient, message_batches: MessageBatchDependency, message_batch_id: FromPath[str]
    ) -> MessageBatch:
        """Cancel a batch: no more of its requests are answered."""
        async with message_batches.database.write() as session:
            await message_batches.find(session, owner, message_batch_id)
            batch = await cancel_batch(session, owner.project_id, message_batch_id, message_batches.batches.now)
            (found,) = await views_of(session, [batch])
        message_batches.batches.on_change()
        return found

    @delete("/{message_batch_id:str}", status_code=200, opt=_described(errors=(409,)))
    async def delete_message_batch(
        self, owner: AuthenticatedClient, message_batches: MessageBatchDependency, message_batch_id: FromPath[str]
    ) -> DeletedMessageBatch:
        """Delete an ended batch with its results."""
        async with message_batches.database.read() as session:
            batch = await message_batches.find(session, owner, message_batch_id)
            with_input = await message_batches.has_own_input(session, batch)
        await delete_batch(message_batches.database, message_batch_id, with_input=with_input)
        return {"id": message_batch_id, "type": "message_batch_deleted"}

    @get("/{message_batch_id:str}/results", opt=_described(answers={200: {JSONL: MessageBatchResult}}, errors=(410,)))
    async def get_message_batch_results(
        self, owner: AuthenticatedClient, message_batches: MessageBatchDependency, message_batch_id: FromPath[str]
    ) -> Stream:
        """Return the results of an ended batch, one in each line."""
        async with message_batches.database.read() as session:
            batch = await message_batches.find(session, owner, message_batch_id)
        if batch.status in OPEN:
            raise NotFound(
                "the batch has not ended; its results are there when its 'processing_status' is 'ended'",
                code="batch_not_over",
            )
        parts = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                file = await message_batches.files.get(owner.project_id, file_id)
                parts.append(await message_batches.files.read(file))

        async def lines() -> AsyncIterator[bytes]:
            for pieces in parts:
                async for line in results_of(pieces):
                    yield line

        return Stream(lines(), media_type=JSONL)


def message_batch_routes(batches: Batches) -> Router:
    """Return the routes, over the batches of the process."""
    services = batches.services
    return with_services(
        MessageBatchController,
        owner=owner_of_request(batches.authenticator, api_key_authorization),
        message_batches=MessageBatchServices(
            services.database, services, batches.uploads, batches.files, batches.limits
        ),
    )
