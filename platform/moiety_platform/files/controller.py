"""`/v1/files`: maps HTTP to the files. Every route requires an inference key, and reads only its project's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from litestar import Request, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery
from litestar.response import Stream

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.client import authenticate
from moiety_platform.auth.principal import Principal
from moiety_platform.db.keyset import After, Listing, list_fields, parse_list
from moiety_platform.files.schemas import DOWNLOAD, UPLOAD, DeletedFile, FileObject, view
from moiety_platform.files.service import Files
from moiety_platform.files.upload import Uploads
from moiety_platform.openapi.described import fails
from moiety_platform.openapi.documents import KEY
from moiety_platform.query_parameters import one_of, whole

DEFAULT_LIST = MAX_LIST = 10_000
TAGS = ["files"]
SECURITY = [{KEY: list[str]()}]

Limit = Annotated[str | None, whole("At most so many, all if not given.", 1, MAX_LIST)]
Order = Annotated[str | None, one_of("By time; desc if not given.", "asc", "desc")]


@dataclass(frozen=True, slots=True)
class FileServices:
    """Dependencies of these endpoints."""

    authenticator: Authenticator
    files: Files
    uploads: Uploads


def file_routes(services: FileServices) -> list[HTTPRouteHandler]:
    """Return the handlers of these endpoints."""
    files = services.files

    async def caller(request: Request[Any, Any, Any]) -> Principal:
        return await authenticate(services.authenticator, request)

    @post("/v1/files", name="upload_file", status_code=200, tags=TAGS, security=SECURITY, opt=UPLOAD)
    async def upload_file(request: Request[Any, Any, Any]) -> FileObject:
        """Upload a file of requests for a batch."""
        owner = await caller(request)
        return view(await services.uploads.receive(owner, request.scope, request.receive))

    @get("/v1/files", name="list_files", tags=TAGS, security=SECURITY)
    async def list_files(
        request: Request[Any, Any, Any],
        limit: Limit = None,
        after: After = None,
        order: Order = None,
        purpose: FromQuery[str | None] = None,
    ) -> Listing[FileObject]:
        """List the project's files, newest first unless `order` is asc."""
        owner = await caller(request)
        wanted = parse_list(limit, after, order, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)
        found, has_more = await files.list(owner.project_id, wanted, purpose)
        return list_fields([view(file) for file in found], has_more)

    @get("/v1/files/{file_id:str}", name="retrieve_file", tags=TAGS, security=SECURITY)
    async def retrieve_file(request: Request[Any, Any, Any], file_id: FromPath[str]) -> FileObject:
        """Return one file."""
        return view(await files.get((await caller(request)).project_id, file_id))

    @delete(
        "/v1/files/{file_id:str}",
        name="delete_file",
        status_code=200,
        tags=TAGS,
        security=SECURITY,
        opt=fails(409),
    )
    async def delete_file(request: Request[Any, Any, Any], file_id: FromPath[str]) -> DeletedFile:
        """Delete a file that no batch is reading."""
        await files.delete((await caller(request)).project_id, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @get("/v1/files/{file_id:str}/content", name="download_file", tags=TAGS, security=SECURITY, opt=DOWNLOAD)
    async def download_file(request: Request[Any, Any, Any], file_id: FromPath[str]) -> Stream:
        """Return a file's content."""
        file = await files.get((await caller(request)).project_id, file_id)
        headers = {"content-length": str(file.num_bytes)}
        return Stream(await files.read(file), media_type="application/octet-stream", headers=headers)

    return [upload_file, list_files, retrieve_file, delete_file, download_file]
