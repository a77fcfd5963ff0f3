"""`/v1/files`: maps HTTP to the files. Every route requires an inference key, and reads only its project's files.

A request with the header `anthropic-version` gets the format of Anthropic's Files API, and the others OpenAI's.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter, SkipValidation
from litestar.response import Stream

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.db.keyset import After, list_fields, parse_list
from moiety_platform.files.anthropic_objects import (
    UPLOAD_PURPOSE,
    FileMetadata,
    FileMetadataPage,
    RemovedFile,
    check_downloadable,
    metadata_of,
    page_of,
    parse_page,
)
from moiety_platform.files.schemas import DOWNLOAD, UPLOAD, DeletedFile, FileList, FileObject, view
from moiety_platform.files.service import Files
from moiety_platform.files.upload import Uploads
from moiety_platform.known_parameters import IGNORED, SENT_BY_BETA_CLIENTS
from moiety_platform.openapi.described import fails
from moiety_platform.openapi.documents import ANTHROPIC_KEY, KEY
from moiety_platform.openapi.schemas import either
from moiety_platform.query_parameters import one_of, whole
from moiety_platform.request_head import VERSION_HEADER, fields_of

DEFAULT_LIST = MAX_LIST = 10_000
SECURITY = [{name: list[str]()} for name in (KEY, ANTHROPIC_KEY)]

Limit = Annotated[str | None, whole("Largest number of results, all if not given.", 1, MAX_LIST)]
Order = Annotated[str | None, one_of("Order by time; desc if not given.", "asc", "desc")]


BeforeId = Annotated[str | None, QueryParameter(description="The id of the file after the page (Anthropic's list).")]
AfterId = Annotated[str | None, QueryParameter(description="The id of the file before the page (Anthropic's list).")]
Page = Annotated[str | None, QueryParameter(description="The `next_page` of the page before (Anthropic's list).")]

_BETA = {IGNORED: SENT_BY_BETA_CLIENTS}

FilesDependency = NamedDependency[SkipValidation[Files]]


class FileController(Controller):
    """Routes of files."""

    path = "/v1/files"
    tags = ("files",)
    security = SECURITY

    @post(status_code=200, opt=UPLOAD | _BETA)
    async def upload_file(
        self,
        owner: AuthenticatedClient,
        uploads: NamedDependency[SkipValidation[Uploads]],
        request: Request[Any, Any, Any],
    ) -> Annotated[Any, either(FileObject, FileMetadata)]:
        """Upload a file of requests for a batch, or an image that requests can name by the file's id.

        With the header `anthropic-version`, `purpose` may be missing: the file is then one that requests can name.
        """
        if VERSION_HEADER in fields_of(request.scope):
            return metadata_of(await uploads.receive(owner, request.scope, request.receive, UPLOAD_PURPOSE))
        return view(await uploads.receive(owner, request.scope, request.receive))

    @get(opt=_BETA)
    async def list_files(
        self,
        owner: AuthenticatedClient,
        files: FilesDependency,
        request: Request[Any, Any, Any],
        limit: Limit = None,
        after: After = None,
        order: Order = None,
        purpose: FromQuery[str | None] = None,
        page: Page = None,
        before_id: BeforeId = None,
        after_id: AfterId = None,
    ) -> Annotated[Any, either(FileList, FileMetadataPage)]:
        """List the project's files, newest first unless `order` is asc.

        A request with the header `anthropic-version` gets them in Anthropic's fields, page by page.
        """
        if VERSION_HEADER in fields_of(request.scope):
            asked = parse_page(limit, page, before_id, after_id)
            return page_of(*await files.list(owner.project_id, asked, purpose), asked)
        list_request = parse_list(limit, after, order, default_limit=DEFAULT_LIST, max_limit=MAX_LIST)
        found, has_more = await files.list(owner.project_id, list_request, purpose)
        return list_fields([view(file) for file in found], has_more)

    @get("/{file_id:str}", opt=_BETA)
    async def retrieve_file(
        self,
        owner: AuthenticatedClient,
        files: FilesDependency,
        request: Request[Any, Any, Any],
        file_id: FromPath[str],
    ) -> Annotated[Any, either(FileObject, FileMetadata)]:
        """Return one file, in Anthropic's fields if the request has the header `anthropic-version`."""
        file = await files.get(owner.project_id, file_id)
        return metadata_of(file) if VERSION_HEADER in fields_of(request.scope) else view(file)

    @delete("/{file_id:str}", status_code=200, opt=fails(409) | _BETA)
    async def delete_file(
        self,
        owner: AuthenticatedClient,
        files: FilesDependency,
        request: Request[Any, Any, Any],
        file_id: FromPath[str],
    ) -> Annotated[Any, either(DeletedFile, RemovedFile)]:
        """Delete a file that no batch is reading."""
        await files.delete(owner.project_id, file_id)
        if VERSION_HEADER in fields_of(request.scope):
            return {"id": file_id, "type": "file_deleted"}
        return {"id": file_id, "object": "file", "deleted": True}

    @get("/{file_id:str}/content", opt=DOWNLOAD | _BETA)
    async def download_file(
        self,
        owner: AuthenticatedClient,
        files: FilesDependency,
        request: Request[Any, Any, Any],
        file_id: FromPath[str],
    ) -> Stream:
        """Return a file's content. With the header `anthropic-version`, that of an upload is refused."""
        file = await files.get(owner.project_id, file_id)
        if VERSION_HEADER in fields_of(request.scope):
            check_downloadable(file)
        headers = {"content-length": str(file.num_bytes)}
        return Stream(await files.read(file), media_type="application/octet-stream", headers=headers)
