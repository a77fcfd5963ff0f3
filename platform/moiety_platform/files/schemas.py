"""Responses for files in OpenAI's format, and the upload form."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from moiety_platform.db.keyset import Listing
from moiety_platform.fast_path import OWN_BODY_LIMIT
from moiety_platform.files.models import StoredFile
from moiety_platform.files.upload import MAX_EXPIRY_S, MIN_EXPIRY_S, PURPOSES
from moiety_platform.openapi.described import Described, describes
from moiety_platform.openapi.headers import LENGTH

Size = Annotated[int, Meta(extra_json_schema={"minimum": 0})]


class FileObject(TypedDict):
    """A file. Times are Unix seconds."""

    id: str
    object: Literal["file"]
    bytes: Size
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Listing[FileObject]):
    """A page of files."""


class DeletedFile(TypedDict):
    """A deleted file."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


_EXPIRES = {
    "expires_after[anchor]": {"const": "created_at"},
    "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
}

UPLOAD_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "purpose": {
            "enum": list(PURPOSES),
            "description": "OpenAI's field. It is required without the header `anthropic-version`; with it, a form "
            "without a purpose gets `user_data`.",
        },
        "file": {
            "type": "string",
            "contentMediaType": "application/octet-stream",
            "minLength": 1,
            "description": "Requests in JSON, one per line, an image (PNG, JPEG, WebP or GIF), a PDF file or text.",
        },
        **_EXPIRES,
        "expires_in_seconds": {
            "type": "integer",
            "minimum": MIN_EXPIRY_S,
            "maximum": MAX_EXPIRY_S,
            "description": "Anthropic's field, in place of `expires_after`.",
        },
    },
    "dependentRequired": {one: [other for other in _EXPIRES if other != one] for one in _EXPIRES},
}

UPLOAD = {
    **describes(Described(body={"multipart/form-data": UPLOAD_FORM}, errors=(409, 507))),
    OWN_BODY_LIMIT: True,
}
DOWNLOAD = describes(
    Described(
        answers={200: {"application/octet-stream": {}}},
        answer_headers=(LENGTH,),
        errors=(410,),
    )
)


def view(file: StoredFile) -> FileObject:
    """Return a file in the format of OpenAI's API."""
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
