"""Files in the format of Anthropic's Files API, for clients that send `anthropic-version`."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from moiety_platform.db.keyset import ListRequest
from moiety_platform.errors import BadRequest
from moiety_platform.files.models import StoredFile
from moiety_platform.files.upload import PURPOSES
from moiety_platform.query_parameters import parse_whole

DEFAULT_PAGE = 20
MAX_PAGE = 1000
UPLOAD_PURPOSE = "user_data"  # of files whose upload names none
_CURSOR_PREFIX = "page_"
_OTHER_TYPE = "application/octet-stream"

Size = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


class FileMetadata(TypedDict):
    """A file in Anthropic's fields. Its type is that of its name's extension."""

    id: str
    type: Literal["file"]
    filename: str
    mime_type: str
    size_bytes: Size
    created_at: str
    expires_at: str | None
    downloadable: bool


class FileMetadataPage(TypedDict):
    """A page of files. `next_page` is the parameter `page` of the next request."""

    data: list[FileMetadata]
    has_more: bool
    first_id: str | None
    last_id: str | None
    next_page: str | None


class RemovedFile(TypedDict):
    """A deleted file in Anthropic's fields."""

    id: str
    type: Literal["file_deleted"]


def metadata_of(file: StoredFile) -> FileMetadata:
    """Return a file in the format of Anthropic's API."""
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": mimetypes.guess_type(file.filename)[0] or _OTHER_TYPE,
        "size_bytes": file.num_bytes,
        "created_at": _time(file.created_ms),
        "expires_at": None if file.expires_ms is None else _time(file.expires_ms),
        "downloadable": is_downloadable(file),
    }


def is_downloadable(file: StoredFile) -> bool:
    """Return whether Anthropic's API lets the file be downloaded: one that the server made, and not an upload."""
    return file.purpose not in PURPOSES


def check_downloadable(file: StoredFile) -> None:
    """Refuse to return the content of an upload. Raises BadRequest."""
    if not is_downloadable(file):
        raise BadRequest(
            f"the file {file.id!r} was uploaded, and uploads cannot be downloaded in this API; keep your own copy",
            code="file_not_downloadable",
            param="file_id",
        )


def parse_page(limit: str | None, page: str | None, before_id: str | None, after_id: str | None) -> ListRequest:
    """Return the page that a client requests. Raises BadRequest."""
    most = DEFAULT_PAGE if limit is None else parse_whole(limit, "limit")
    if not 1 <= most <= MAX_PAGE:
        raise BadRequest(f"'limit' must be between 1 and {MAX_PAGE:,}, not {most}", param="limit")
    given = {"page": page, "before_id": before_id, "after_id": after_id}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise BadRequest(f"{names[0]!r} and {names[1]!r} exclude each other; send only one", param=names[0])
    if page is not None and not page.startswith(_CURSOR_PREFIX):
        raise BadRequest("'page' must be the 'next_page' of an earlier answer", param="page")
    after = after_id if page is None else page.removeprefix(_CURSOR_PREFIX)
    return ListRequest(most, before_id or after, newest_first=before_id is None)


def page_of(files: Sequence[StoredFile], has_more: bool, list_request: ListRequest) -> FileMetadataPage:
    """Return a page of files, newest first, also where it was read from its end."""
    data = [metadata_of(file) for file in (files if list_request.newest_first else files[::-1])]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    is_followed = has_more and list_request.newest_first
    next_page = f"{_CURSOR_PREFIX}{last}" if is_followed else None
    return {"data": data, "has_more": has_more, "first_id": first, "last_id": last, "next_page": next_page}


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat().replace("+00:00", "Z")
