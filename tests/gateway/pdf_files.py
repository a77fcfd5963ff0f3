"""PDF files, written by hand: with text, without, and hostile ones."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

from pypdf import PdfReader, PdfWriter


def pdf_of_objects(objects: Sequence[bytes]) -> bytes:
    """Return a PDF file of numbered objects, of which the first is the catalog."""
    body, offsets = bytearray(b"%PDF-1.7\n"), list[int]()
    for number, content in enumerate(objects, start=1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    body += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return bytes(body + b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start))


def stream(content: bytes, entries: bytes = b"") -> bytes:
    """Return a stream object."""
    return b"<</Length %d%s>>\nstream\n%s\nendstream" % (len(content), entries, content)


def _pages(contents: Sequence[bytes]) -> bytes:
    """Return a PDF file of pages with these streams."""
    numbers = [4 + 2 * place for place in range(len(contents))]
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(contents), kids),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for number, content in zip(numbers, contents, strict=True):
        resources = b"/Resources<</Font<</F1 3 0 R>>>>"
        page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]%s/Contents %d 0 R>>" % (resources, number + 1)
        objects += [page, content]
    return pdf_of_objects(objects)


def text_operators(text: str) -> bytes:
    """Return the operators of a content stream that shows a line."""
    return b"BT /F1 12 Tf 72 700 Td (%s) Tj ET" % text.encode("latin-1")


def pdf(*pages: str) -> bytes:
    """Return a PDF file with a line of text on each page. An empty line is a page without text."""
    return _pages([stream(text_operators(text) if text else b"") for text in pages])


def encrypted_pdf(text: str, password: str) -> bytes:
    """Return a PDF file whose text needs a password; an empty one forbids printing only."""
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(text))))
    writer.encrypt(password, "owner", algorithm="AES-128")
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()


def compressed_pdf(content: bytes, times: int = 1) -> bytes:
    """Return a PDF file whose only page is compressed so many times."""
    for _ in range(times):
        content = zlib.compress(content, 9)
    return _pages([stream(content, b"/Filter[%s]" % (b"/FlateDecode" * times))])


def endless_pdf() -> bytes:
    """Return a small PDF file that takes minutes of processor time to read."""
    return compressed_pdf(b"BT /F1 12 Tf " + b"1 0 0 1 0 0 Tm " * (1 << 22) + text_operators("a"))


def recursive_pdf() -> bytes:
    """Return a PDF file whose tree of pages contains itself."""
    return pdf_of_objects([b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Count 3/Kids[2 0 R 2 0 R]>>"])
