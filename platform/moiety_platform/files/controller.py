"""`/v1/files`: maps HTTP to the files. Every route requires an inference key, and reads only its project's files."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, SkipValidation
from litestar.response import Stream

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.db.keyset import After, Listing, list_fields, parse_list
from moiety_platform.files.schemas import DOWNLOAD, UPLOAD, DeletedFile, FileObject, view
from moiety_platform.files.service import Files
from moiety_platform.files.upload import Uploads
from moiety_platform.openapi.described import fails
from moiety_platform.openapi.documents import KEY
from moiety_platform.query_parameters import one_of, whole

DEFAULT_LIST = MAX_LIST = 10_000
SECURITY = [{KEY: list[str]()}]

Limit = Annotated[str | None, whole("Largest number of results, all if not given.", 1, MAX_LIST)]
Order = Annotated[str | None, one_of("Order by time; desc if not given.", "asc", "desc")]


FilesDependency = NamedDependency[SkipValidation[Files]]


class FileController(Controller):
    """Routes of files."""

    path = "/v1/files"
    tags = ("files",)
    security = SECURITY

    @post(status_code=200, opt=UPLOAD)
    async def upload_file(
        self,
        owner: AuthenticatedClient,
        uploads: NamedDependency[SkipValidation[Uploads]],
        request: Request[Any, Any, Any],
    ) -> FileObject:
        """Upload a file of requests for a batch, or an image that requests can name by the file's id."""
        return view(await uploads.receive(owner, request.scope, request.receive))

    @get()
    async def list_files(
        self,
        owner: AuthenticatedClient,
        files: FilesDependency,
        limit: Limit = None,
        after: After = None,
        order: Order = None,
        purpose: FromQuery[str | None] = None,
    ) -> Listing[FileObject]:
        """List the project's files, newest first unless `order` is asc."""
        list_request = parse_list(limit, after, order, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)
        found, has_more = await files.list(owner.project_id, list_request, purpose)
        return list_fields([view(file) for file in found], has_more)

    @get("/{file_id:str}")
    async def retrieve_file(
        self, owner: AuthenticatedClient, files: FilesDependency, file_id: FromPath[str]
    ) -> FileObject:
        """Return one file."""
        return view(await files.get(owner.project_id, file_id))

    @delete("/{file_id:str}", status_code=200, opt=fails(409))
    async def delete_file(
        self, owner: AuthenticatedClient, files: FilesDependency, file_id: FromPath[str]
    ) -> DeletedFile:
        """Delete a file that no batch is reading."""
        await files.delete(owner.project_id, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @get("/{file_id:str}/content", opt=DOWNLOAD)
    async def download_file(self, owner: AuthenticatedClient, files: FilesDependency, file_id: FromPath[str]) -> Stream:
        """Return a file's content."""
        file = await files.get(owner.project_id, file_id)
        headers = {"content-length": str(file.num_bytes)}
        return Stream(await files.read(file), media_type="application/octet-stream", headers=headers)
