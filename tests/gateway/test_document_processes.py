"""Processes that read PDF files: their limits, their faults, and what they know of the gateway."""

from __future__ import annotations

import os
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from moiety_platform.document_extraction.extractor import DocumentLimits, DocumentRefused, PdfExtractor
from moiety_platform.errors import Unavailable

from .pdf_files import endless_pdf
from .test_documents import PAGES, READ


@pytest.fixture
def extractor() -> Any:
    made = PdfExtractor()
    yield made
    made.close()


def test_the_memory_of_a_process_is_bounded(extractor: PdfExtractor) -> None:
    with pytest.raises(DocumentRefused, match="takes more than 64 MiB of memory"):
        extractor.extract(endless_pdf(), DocumentLimits(memory_bytes=64 << 20))
    assert extractor.extract(PAGES, DocumentLimits()).text == READ


def test_a_process_that_takes_too_long_is_not_the_fault_of_its_file(extractor: PdfExtractor) -> None:
    with pytest.raises(Unavailable, match=r"took more than 0\.3 s"):
        extractor.extract(endless_pdf(), DocumentLimits(wall_s=0.3))
    assert extractor.extract(PAGES, DocumentLimits()).num_pages == 3


LIAR = """
import os, signal, socket, sys, time
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.template import Template
from moiety_platform.document_extraction.frames import DocumentTemplateReady, ExtractionOrder


def answer(link):
    receive_frame(link, ExtractionOrder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    link.sendall((ANNOUNCED).to_bytes(4, "little"))
    while True:
        time.sleep(0.05)
        if ANNOUNCED == 4096:
            link.sendall(b"a")


control = socket.socket(fileno=int(sys.argv[1]))
send_frame(control, DocumentTemplateReady())
Template(control, answer).serve()
"""


@pytest.mark.parametrize("num_announced", [4096, 1 << 30])
def test_a_process_that_was_taken_over_neither_holds_its_place_nor_takes_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_announced: int
) -> None:
    monkeypatch.setattr("moiety_platform.document_extraction.extractor.GRACE_S", 0.5)
    worker = tmp_path / "worker.py"
    worker.write_text(LIAR.replace("ANNOUNCED", str(num_announced)))
    extractor = PdfExtractor([str(worker)])
    begun_s = time.monotonic()
    tracemalloc.start()
    try:
        if num_announced == 4096:
            with pytest.raises(Unavailable, match="took more than 1 s"):
                extractor.extract(PAGES, DocumentLimits(wall_s=1.0))
        else:
            with pytest.raises(DocumentRefused, match="nonsense"):
                extractor.extract(PAGES, DocumentLimits(wall_s=60.0))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        extractor.close()
    assert time.monotonic() - begun_s < 30


def test_processes_have_no_secrets_of_the_gateway(extractor: PdfExtractor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOIETY_KEY_PEPPER", "a secret")
    extractor.extract(PAGES, DocumentLimits())
    template = extractor._template
    assert template is not None
    environment = Path(f"/proc/{template.pid}/environ").read_bytes()
    assert b"PATH=" in environment and b"a secret" not in environment


def test_a_killed_template_is_started_again_and_a_closed_extractor_reads_nothing(extractor: PdfExtractor) -> None:
    extractor.extract(PAGES, DocumentLimits())
    template = extractor._template
    assert template is not None
    os.kill(template.pid, signal.SIGKILL)
    assert extractor.extract(PAGES, DocumentLimits()).text == READ
    assert template.restarts_total == 1
    extractor.close()
    with pytest.raises(Unavailable, match="shutting down"):
        extractor.extract(PAGES, DocumentLimits())
