"""Sources of images and documents in content blocks, in Anthropic's fields."""

from __future__ import annotations

from typing import Literal

from moiety_platform.inference.body_fields import StrictBody


class Base64Source(StrictBody):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(StrictBody):
    type: Literal["url"]
    url: str


class UploadedSource(StrictBody):
    type: Literal["file"]
    file_id: str


class PlainTextSource(StrictBody):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str
