"""The preparation of documents as the settings want it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from moiety_platform.document_extraction.extractor import DocumentLimits, PdfExtractor
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.files.prompt_files import UploadedPromptFiles
from moiety_platform.inference.document_preparation import DocumentPreparation
from moiety_platform.inference.link_fetcher import LinkFetcher
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings

DOCUMENT_SETTINGS = [
    "document_memory_bytes", "document_cpu_s", "document_wall_s", "document_cache_bytes",
    "max_document_bytes", "max_document_pages", "max_document_characters", "max_document_requests_per_tenant",
]  # fmt: skip


def document_preparation_of(
    settings: GatewaySettings,
    live: LiveSettings[GatewaySettings],
    uploaded: UploadedPromptFiles,
    cache: DocumentTextCache,
    registry: CollectorRegistry,
    fetcher: LinkFetcher,
) -> DocumentPreparation:
    """Return a preparation of documents that follows the settings. Its owner closes it."""
    prepared = DocumentPreparation(
        PdfExtractor(), settings.document_processes, uploaded.read_document_head, uploaded.read_document,
        cache, registry, fetcher,
    )  # fmt: skip

    def use(settings: GatewaySettings) -> None:
        cache.max_bytes = settings.document_cache_bytes
        prepared.limits = DocumentLimits(
            max_bytes=settings.max_document_bytes,
            max_pages=settings.max_document_pages,
            max_characters=settings.max_document_characters,
            cpu_s=settings.document_cpu_s,
            wall_s=settings.document_wall_s,
            memory_bytes=settings.document_memory_bytes,
            max_requests_per_tenant=settings.max_document_requests_per_tenant,
        )

    use(settings)
    live.follow(DOCUMENT_SETTINGS, use)
    return prepared
