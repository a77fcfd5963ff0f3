"""Documents in conversations: their parts in messages until they are read, and the text that the model reads of each.

A message with a document that is not read yet has a list of parts as its content. Beside those with text and images,
`{"type": "document", "document": PromptDocument}` stands for a document (see `document_preparation`).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping
from html import escape
from typing import Any

from moiety_platform.document_extraction.extractor import DocumentRefused
from moiety_platform.document_extraction.frames import RefusalReason
from moiety_platform.inference.generation import PromptDocument
from moiety_platform.inference.prompt_images import check_link, decode_base64, is_link

INVALID_DOCUMENT = "invalid_document"  # an error code
FILE_DATA_PATTERN = "^(data:[^,]*;base64,)?[A-Za-z0-9+/]+=*$"  # for schemas
_DATA_URL = "data:"
_ENCODED = ";base64"
_PDF_HEAD = b"%PDF-"
_HEAD_BYTES = 1024  # in which a PDF file begins
_PIECE_BYTES = 1 << 18  # of text that is decoded without a pause


def document_part(document: PromptDocument) -> dict[str, Any]:
    """Return a part with a document that is not read yet."""
    return {"type": "document", "document": document}


def is_document(part: Mapping[str, Any]) -> bool:
    """Return whether a part is a document that is not read yet."""
    return bool(part["type"] == "document")


def is_pdf(head: bytes) -> bool:
    """Return whether a file is a PDF file, by its first bytes."""
    return _PDF_HEAD in head[:_HEAD_BYTES]


def document_of_base64(text: str) -> PromptDocument:
    """Return the document of a file in base64. Raises ValueError."""
    data = decode_base64(text, "document")
    if not data:
        raise ValueError("the document is empty; send its file")
    return PromptDocument(data)


def document_of_file_data(text: str) -> PromptDocument:
    """Return the document of a data URL, or of a file in base64 alone. Raises ValueError."""
    if not text.startswith(_DATA_URL):
        return document_of_base64(text)
    head, _, data = text.partition(",")
    if not head.endswith(_ENCODED):
        raise ValueError("the data URL is not in base64; send data:application/pdf;base64,…")
    return document_of_base64(data)


def document_of_link(url: str) -> PromptDocument:
    """Return the document at a link. Raises ValueError."""
    if not is_link(url):
        raise ValueError("the URL is not a link; send https://…")
    check_link(url)
    return PromptDocument(link=url)


def text_of_file(data: bytes, max_characters: int) -> str:
    """Return the text of a plain-text file in UTF-8, or its beginning, which is longer than `max_characters`.

    It is decoded in pieces, between which other threads can run. Raises DocumentRefused.
    """
    decoder, texts, num_characters = getincrementaldecoder("utf-8-sig")(), list[str](), 0
    for start in range(0, len(data), _PIECE_BYTES):
        try:
            text = decoder.decode(data[start : start + _PIECE_BYTES], final=start + _PIECE_BYTES >= len(data))
        except UnicodeDecodeError:
            raise DocumentRefused(
                "is neither a PDF file nor plain text in UTF-8; extract its text, and send that",
                RefusalReason.NOT_TEXT,
            ) from None
        if "\0" in text:
            why = "is neither a PDF file nor plain text; extract its text, and send that"
            raise DocumentRefused(why, RefusalReason.NOT_TEXT)
        texts.append(text)
        num_characters += len(text)
        if num_characters > max_characters:
            break
    return "".join(texts)


def tagged(tag: str, text: str, **attributes: str | None) -> str:
    """Return the text in a tag with those attributes that have a value, as the model reads it."""
    named = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value)
    return f"<{tag}{named}>\n{text}\n</{tag}>"


def shown_document(text: str, title: str | None, context: str | None) -> str:
    """Return what the model reads of a document's text."""
    return tagged("document", "\n".join(part for part in (context, text) if part), title=title)
