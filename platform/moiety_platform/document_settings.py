"""Settings of the gateway for the documents of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic_settings import NoDecode

from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import fixed, live

_MIB = 1 << 20


class DocumentSettings(ProcessSettings):
    """Limits of documents. The defaults for bytes and pages are those of Anthropic's API."""

    document_processes: int = fixed(
        2, "Number of PDF files that this gateway reads at the same time, each in a process of its own.", ge=1, le=64
    )
    document_memory_bytes: int = live(
        512 * _MIB, "Memory that the process of a PDF file can allocate, in bytes.", ge=64 * _MIB
    )
    document_cpu_s: float = live(
        20.0, "Processor time that the process of a PDF file can use, in seconds.", gt=0, le=600
    )
    document_wall_s: float = live(
        60.0, "Time after which the process of a PDF file is ended, in seconds. The request gets 503.", gt=0, le=3600
    )
    document_cache_bytes: int = live(
        64 * _MIB,
        "Memory for the texts of recent PDF files, by tenant, in bytes. 0: none is cached.",
        ge=0,
        le=64 << 30,
    )
    max_document_bytes: int = live(
        32 * _MIB, "Largest size of the document files of a request together, in bytes.", ge=1024, le=512 * _MIB
    )
    max_document_pages: int = live(600, "Largest number of PDF pages in a request.", ge=1, le=100_000)
    max_document_characters: int = live(
        4 * _MIB, "Largest text of the documents of a request together, in characters.", ge=1, le=64 * _MIB
    )
    max_document_requests_per_tenant: int = live(
        16, "Largest number of requests of a tenant whose documents this gateway reads. Others get 429.", ge=1
    )
    document_link_networks: Annotated[tuple[str, ...], NoDecode] = live(
        (),
        "Private networks to which links to documents may lead, in addition to the public internet. "
        "Every tenant can read any text in them.",
    )
    max_document_links: int = live(
        0, "Largest number of links to documents in a request. 0: none is followed.", ge=0, le=64
    )
