"""`/v1/files`. Maps HTTP to the files; every route needs a key for inference, and sees its project's files only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import authenticate
from moiety_platform.auth.principal import Principal
from moiety_platform.db.keyset import list_fields, parse_list
from moiety_platform.files.models import StoredFile
from moiety_platform.files.service import Files
from moiety_platform.files.upload import Uploads

DEFAULT_LIST = MAX_LIST = 10_000


@dataclass(frozen=True, slots=True)
class FileServices:
    """What these endpoints need."""

    authenticator: Authenticator
    files: Files
    uploads: Uploads


def file_routes(services: FileServices) -> list[HTTPRouteHandler]:
    """The handlers of these endpoints."""
    files = services.files

    async def caller(request: Request[Any, Any, Any]) -> Principal:
        return await authenticate(services.authenticator, request)

    @post("/v1/files", name="upload_file", status_code=200)
    async def upload_file(request: Request[Any, Any, Any]) -> dict[str, Any]:
        """Upload a file of requests for a batch."""
        owner = await caller(request)
        return view(await services.uploads.receive(owner, request.scope, request.receive))

    @get("/v1/files", name="list_files")
    async def list_files(
        request: Request[Any, Any, Any],
        limit: FromQuery[int | None] = None,
        after: FromQuery[str | None] = None,
        order: FromQuery[str | None] = None,
        purpose: FromQuery[str | None] = None,
    ) -> dict[str, Any]:
        """The project's files, newest first unless `order` is asc."""
        owner = await caller(request)
        wanted = parse_list(limit, after, order, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)
        found, has_more = await files.list(owner.project_id, wanted, purpose)
        return list_fields([view(file) for file in found], has_more)

    @get("/v1/files/{file_id:str}", name="retrieve_file")
    async def retrieve_file(request: Request[Any, Any, Any], file_id: FromPath[str]) -> dict[str, Any]:
        """One file."""
        return view(await files.get((await caller(request)).project_id, file_id))

    @delete("/v1/files/{file_id:str}", name="delete_file", status_code=200)
    async def delete_file(request: Request[Any, Any, Any], file_id: FromPath[str]) -> dict[str, Any]:
        """Delete a file that no batch is reading."""
        await files.delete((await caller(request)).project_id, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @get("/v1/files/{file_id:str}/content", name="download_file")
    async def download_file(request: Request[Any, Any, Any], file_id: FromPath[str]) -> Stream:
        """A file's content."""
        file = await files.get((await caller(request)).project_id, file_id)
        headers = {"content-length": str(file.num_bytes)}
        return Stream(files.read(file), media_type="application/octet-stream", headers=headers)

    return [upload_file, list_files, retrieve_file, delete_file, download_file]


def view(file: StoredFile) -> dict[str, Any]:
    """A file as OpenAI's API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_ms // 1000,
        "expires_at": None if file.expires_ms is None else file.expires_ms // 1000,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
