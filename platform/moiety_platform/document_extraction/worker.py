"""`python -m moiety_platform.document_extraction.worker FD`: template of document processes, started by a gateway.

Each file is read by a process of its own, forked from the template, which has loaded pypdf and never receives a file
itself. The process ends with the file, so nothing of one tenant's document is left for another's.
"""

from __future__ import annotations

import gc
import io
import logging
import signal
import socket
import sys
from functools import partial
from typing import NoReturn

from pypdf import PasswordType, PdfReader
from pypdf.errors import LimitReachedError

from moiety_limited_processes.child_limits import limit_child, run_to_exit
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.template import serve_template
from moiety_platform.document_extraction.frames import (
    DocumentTemplateReady,
    ExtractionOrder,
    ExtractionReport,
    RefusalReason,
)

NICENESS = 5  # extraction yields to the gateway's event loop

ENCRYPTED = "is encrypted; remove its password, and send it again"
NO_PAGES = "has no pages; send a file with text"
NO_TEXT = "has no text, as a scan; only text is read, so recognize its text (OCR), and send that"
TOO_COMPRESSED = "has a part that is too large when it is decompressed; send its text"


def run_child(link: socket.socket) -> NoReturn:
    """Execute one order, and end the process."""
    run_to_exit(partial(_run_order, link))


def _run_order(link: socket.socket) -> None:
    order = receive_frame(link, ExtractionOrder)
    gc.enable()
    limit_child(niceness=NICENESS, memory_bytes=order.memory_bytes, cpu_s=order.cpu_s, wall_s=order.wall_s)
    send_frame(link, extract_text(order))


def extract_text(order: ExtractionOrder) -> ExtractionReport:
    """Return the text of a PDF file, page by page, each below a line with its number. Raises MemoryError."""
    try:
        reader = PdfReader(io.BytesIO(order.data))
        if reader.is_encrypted and reader.decrypt("") is PasswordType.NOT_DECRYPTED:
            return _refusal(ENCRYPTED, RefusalReason.ENCRYPTED)
        return _text_of_pages(reader, order)
    except MemoryError:
        raise
    except LimitReachedError:
        return _refusal(TOO_COMPRESSED, RefusalReason.MEMORY)
    except Exception as exc:  # top of what one file can cause: pypdf raises many kinds for damaged files
        return ExtractionReport(f"cannot be read ({type(exc).__name__}); send a valid PDF file, or its text")


def _text_of_pages(reader: PdfReader, order: ExtractionOrder) -> ExtractionReport:
    num_pages = len(reader.pages)
    if num_pages > order.max_pages:
        why = f"has {num_pages:,} pages, of which {order.max_pages:,} are allowed; send fewer"
        return _refusal(why, RefusalReason.TOO_MANY_PAGES)
    if not num_pages:
        return _refusal(NO_PAGES, RefusalReason.NO_TEXT)
    texts, num_characters, has_text = list[str](), 0, False
    for number in range(num_pages):
        text = _clean(reader.pages[number].extract_text())
        has_text = has_text or bool(text)
        texts.append(f"[page {number + 1}]\n{text}" if text else f"[page {number + 1} has no text]")
        num_characters += len(texts[-1]) + 2
        if num_characters > order.max_characters:
            why = f"has more than the {order.max_characters:,} characters of text that are allowed; send fewer pages"
            return _refusal(why, RefusalReason.TOO_MANY_CHARACTERS)
    if not has_text:
        return _refusal(NO_TEXT, RefusalReason.NO_TEXT)
    return ExtractionReport("", "\n\n".join(texts), num_pages)


def _refusal(why: str, reason: RefusalReason) -> ExtractionReport:
    return ExtractionReport(why, reason=reason)


def _clean(text: str) -> str:
    """Return the text as valid Unicode, without NUL, which databases do not store."""
    return text.encode("utf-8", "replace").decode().replace("\0", "").strip()


def main() -> int:
    (fd,) = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway decides
    logging.disable()  # pypdf's warnings may quote the file
    control = socket.socket(fileno=int(fd))
    serve_template(control, DocumentTemplateReady(), run_child)
    return 0


if __name__ == "__main__":
    sys.exit(main())
