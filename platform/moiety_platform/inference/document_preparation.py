"""Preparation of a conversation's documents before its model is chosen: each becomes the text that the model reads.

A document in a tool's result that cannot be read is replaced by a text that says why: the client's tool has made it,
and the conversation can go on without it. Any other document that cannot be read ends the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from moiety_platform.admission.gate import OpenCounts
from moiety_platform.auth.principal import Principal
from moiety_platform.document_extraction.extractor import (
    DocumentLimits,
    DocumentRefused,
    ExtractedText,
    PdfExtractor,
)
from moiety_platform.document_extraction.frames import RefusalReason
from moiety_platform.document_extraction.metrics import PDF, TEXT, DocumentMetrics
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.errors import BadRequest, Gone, NotFound, PlatformError, RateLimited
from moiety_platform.inference.generation import Conversation, Generation, PromptDocument
from moiety_platform.inference.link_fetcher import DOCUMENT, CannotFetch, LinkFetcher, OpenLinks
from moiety_platform.inference.prompt_documents import (
    INVALID_DOCUMENT,
    is_document,
    is_pdf,
    shown_document,
    text_of_file,
)
from moiety_platform.inference.prompt_images import image_of_file, image_part, is_text, only_text, text_part
from moiety_platform.inference.tenant_slots import TenantSlots
from moiety_wire.images import is_image_file

TOO_MANY_DOCUMENTS = "too_many_documents"  # an error code
NUM_DECODERS = 2  # threads that decode text files
MAX_INLINE_BYTES = 1 << 16  # of a text file that is decoded on the event loop, not in a thread
MAX_INLINE_CHARACTERS = 1 << 18  # of documents whose prompt is built on the event loop, not in a thread


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """Size of an uploaded file, and its first bytes."""

    num_bytes: int
    head: bytes


class IsImage:
    """An uploaded file that is an image, which is prepared as such."""


Found = str | IsImage | PlatformError  # what a document is: its text, an image, or why it cannot be read
ReadHead = Callable[[str, Principal], Awaitable[UploadedFile]]
ReadFile = Callable[[str, Principal], Awaitable[bytes]]


@dataclass(slots=True)
class _DocumentBudget:
    """Remaining limits of the documents of one request."""

    limits: DocumentLimits
    cache_salt: str

    def take(self, **used: int) -> None:
        self.limits = replace(self.limits, **{name: getattr(self.limits, name) - num for name, num in used.items()})


@dataclass(slots=True)
class _ProcessSlot:
    """Slot of a tenant for one process, and what this process reads."""

    reading: asyncio.Future[ExtractedText] | None = None


class DocumentPreparation:
    """Preparation of documents in one gateway process. `limits` can be changed. Closed by its owner."""

    def __init__(
        self,
        extractor: PdfExtractor,
        num_processes: int,
        read_head: ReadHead,
        read_file: ReadFile,
        cache: DocumentTextCache,
        registry: CollectorRegistry,
        fetcher: LinkFetcher,
    ) -> None:
        """Create it. The functions read an uploaded file of a caller; they raise the errors of `prepare`."""
        self.limits = DocumentLimits()
        self.cache = cache
        self._fetcher = fetcher
        self._extractor = extractor
        self._read_head, self._read_file = read_head, read_file
        self._num_processes = num_processes
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="document")
        self._decoders = ThreadPoolExecutor(NUM_DECODERS, thread_name_prefix="document-text")
        self._slots = TenantSlots(num_processes)
        self._requests = OpenCounts()
        self._metrics = DocumentMetrics(registry, cache, self._requests.total)

    async def close(self) -> None:
        """End all processes, and wait for the threads."""
        await asyncio.to_thread(self._extractor.close)
        for threads in (self._threads, self._decoders):
            await asyncio.to_thread(threads.shutdown)

    async def prepare(self, generation: Generation, owner: Principal) -> tuple[Generation, list[str]]:
        """Return the generation with the text of each document, and the paths of documents that are not shown.

        Raises BadRequest for documents that cannot be read, NotFound and Gone for uploaded files, RateLimited, and
        Unavailable.
        """
        prompt = generation.prompts[0]  # a chat has only one
        if not isinstance(prompt, Conversation) or not prompt.documents:
            return generation, []
        prepared, replaced = await self.prepare_conversation(prompt, owner, generation.cache_salt, follows_links=True)
        return msgspec.structs.replace(generation, prompts=(prepared,)), replaced

    async def prepare_conversation(
        self,
        conversation: Conversation,
        owner: Principal,
        cache_salt: str = "",
        *,
        follows_links: bool = False,
    ) -> tuple[Conversation, list[str]]:
        """Return the conversation with the text of each document, and the paths of documents that are not shown.

        Texts are cached for the tenant, and for a `cache_salt` if the request has one. Raises the errors of `prepare`,
        and BadRequest for any link unless it `follows_links`.
        """
        if not conversation.documents:
            return conversation, []
        if not follows_links:
            _refuse_links(conversation)
        read: dict[str | bytes, Found] = {}
        found: list[Found] = []  # for each document of the conversation
        links, max_bytes = _links_of(conversation), self.limits.max_bytes
        with (
            self._counted_request(owner.tenant_id),
            self._fetcher.open_links(links, owner.tenant_id, max_bytes, DOCUMENT) as opened,
        ):
            budget = _DocumentBudget(self.limits, cache_salt)
            for document in conversation.documents:
                if (key := _key_of(document)) not in read:
                    read[key] = await self._read(document, owner, budget, opened)
                found.append(self._charged(document, read[key], budget))
            num_characters = self.limits.max_characters - budget.limits.max_characters
            if num_characters > MAX_INLINE_CHARACTERS:
                return await asyncio.get_running_loop().run_in_executor(None, _read_conversation, conversation, found)
            return _read_conversation(conversation, found)

    def _charged(self, document: PromptDocument, found: Found, budget: _DocumentBudget) -> Found:
        """Return what one document of the conversation is, after the budget has paid for its text there.

        A file that is named several times is read once, but its text is in the prompt each time.
        """
        if not isinstance(found, str):
            return found
        num_characters = len(found) + len(document.title or "") + len(document.context or "")
        if num_characters > budget.limits.max_characters:
            reason = self._too_many_characters()
            self._metrics.observe_refusal(reason.reason)
            return _refusal_of(document, reason)
        budget.take(max_characters=num_characters)
        return found

    def _counted_request(self, tenant_id: str) -> AbstractContextManager[None]:
        """Count a request of the tenant. Raises RateLimited where it has too many."""
        most = self.limits.max_requests_per_tenant
        message = f"{most} requests whose documents are read are running; wait, or send text"
        return self._requests.counted(
            tenant_id, most, lambda: RateLimited(message, code=TOO_MANY_DOCUMENTS, retry_after_s=1)
        )

    async def _read(
        self, document: PromptDocument, owner: Principal, budget: _DocumentBudget, links: OpenLinks
    ) -> Found:
        """Return the text of a document, that it is an image, or why it cannot be read. Raises Unavailable.

        The result does not refer to the file, so that a fetched file is freed before the next one is fetched.
        """
        try:
            if document.link:
                return await self._read_linked(document, owner, budget, links)
            return await self._read_within(document, owner, budget)
        except DocumentRefused as exc:
            self._metrics.observe_refusal(exc.reason)
            return _refusal_of(document, exc)
        except (BadRequest, NotFound, Gone) as exc:
            return exc.with_traceback(None)

    async def _read_linked(
        self, document: PromptDocument, owner: Principal, budget: _DocumentBudget, links: OpenLinks
    ) -> str | IsImage:
        """Return the text of a linked document. Raises DocumentRefused.

        It is fetched when it has its slot for a process, so the files of requests that wait take no memory.
        """
        try:
            links.check_followed()
            async with self._process_slot(owner.tenant_id) as slot:
                fetched = msgspec.structs.replace(document, data=await links.fetch(document.link), link="")
                return await self._read_within(fetched, owner, budget, slot)
        except CannotFetch as exc:
            raise DocumentRefused(f"cannot be fetched: {exc}", RefusalReason.LINK) from exc

    @asynccontextmanager
    async def _process_slot(self, tenant_id: str) -> AsyncIterator[_ProcessSlot]:
        """Hold a slot of the tenant for one process, until what it reads has ended too."""
        await self._slots.acquire(tenant_id, self._num_processes)
        slot = _ProcessSlot()
        try:
            yield slot
        finally:
            if slot.reading is None:
                self._slots.release(tenant_id)
            else:
                slot.reading.add_done_callback(lambda _: self._slots.release(tenant_id))

    async def _read_within(
        self, document: PromptDocument, owner: Principal, budget: _DocumentBudget, slot: _ProcessSlot | None = None
    ) -> str | IsImage:
        """Return the text of a document within the budget, or that it is an image. Raises DocumentRefused.

        A PDF file is read in the slot, or waits for one.
        """
        head, num_bytes = document.data, len(document.data)
        if document.file_id:
            uploaded = await self._read_head(document.file_id, owner)
            head, num_bytes = uploaded.head, uploaded.num_bytes
            if document.may_be_image and is_image_file(head):
                return IsImage()
        if num_bytes > budget.limits.max_bytes:
            raise DocumentRefused(
                f"is too large: the documents of a request may have {self.limits.max_bytes:,} bytes; send fewer",
                RefusalReason.TOO_MANY_BYTES,
            )
        if not num_bytes:
            raise DocumentRefused("is empty; send a file with text", RefusalReason.NO_TEXT)
        budget.take(max_bytes=num_bytes)
        if is_pdf(head):
            extracted = await self._extract_once(document, owner, budget, slot)
            budget.take(max_pages=extracted.num_pages)
            text = extracted.text
        else:
            text = await self._decode(await self._content(document, owner), budget.limits)
        if len(text) > budget.limits.max_characters:
            raise self._too_many_characters()
        return text

    async def _content(self, document: PromptDocument, owner: Principal) -> bytes:
        return await self._read_file(document.file_id, owner) if document.file_id else document.data

    async def _decode(self, data: bytes, limits: DocumentLimits) -> str:
        """Return the text of a plain-text file; large ones are decoded in a thread. Raises DocumentRefused."""
        begun_s = time.monotonic()
        if len(data) <= MAX_INLINE_BYTES:
            text = text_of_file(data, limits.max_characters)
        else:
            decode = partial(text_of_file, data, limits.max_characters)
            text = await asyncio.get_running_loop().run_in_executor(self._decoders, decode)
        self._metrics.observe_read(TEXT, time.monotonic() - begun_s)
        return text

    def _too_many_characters(self) -> DocumentRefused:
        most = self.limits.max_characters
        why = f"is too large: the documents of a request may have {most:,} characters; send fewer"
        return DocumentRefused(why, RefusalReason.TOO_MANY_CHARACTERS)

    async def _extract_once(
        self, document: PromptDocument, owner: Principal, budget: _DocumentBudget, slot: _ProcessSlot | None
    ) -> ExtractedText:
        """Return the text of a PDF file from the cache, or read it. Raises DocumentRefused."""
        limits, begun_s = budget.limits, time.monotonic()
        digest = partial(_cache_key, document, budget.cache_salt)
        key = digest() if len(document.data) <= MAX_INLINE_BYTES else await asyncio.to_thread(digest)
        found = self.cache.find(owner.tenant_id, key, limits)
        if found is not None:
            return found
        try:
            found = await self._extract(document, owner, limits, slot)
        except DocumentRefused as exc:
            if exc.reason not in (RefusalReason.WRONG_PURPOSE, RefusalReason.CRASH):
                self.cache.put(owner.tenant_id, key, DocumentRefused(str(exc), exc.reason), limits)
            raise
        self.cache.put(owner.tenant_id, key, found, limits)
        self._metrics.observe_read(PDF, time.monotonic() - begun_s)
        return found

    async def _extract(
        self, document: PromptDocument, owner: Principal, limits: DocumentLimits, slot: _ProcessSlot | None
    ) -> ExtractedText:
        """Return the text of a PDF file, read in the slot or in a new one."""
        async with self._process_slot(owner.tenant_id) if slot is None else nullcontext(slot) as held:
            data = await self._content(document, owner)
            loop = asyncio.get_running_loop()
            held.reading = loop.run_in_executor(self._threads, self._extractor.extract, data, limits)
            held.reading.add_done_callback(_retrieve_exception)
            return await asyncio.shield(held.reading)


def _retrieve_exception(reading: asyncio.Future[ExtractedText]) -> None:
    """Look at the error of a reading, also where nobody waits for it any more."""
    if not reading.cancelled():
        reading.exception()


def _links_of(conversation: Conversation) -> list[str]:
    return list(dict.fromkeys(document.link for document in conversation.documents if document.link))


def _cache_key(document: PromptDocument, cache_salt: str) -> bytes:
    """Return the key of a document's text: of an upload by its id, whose content never changes, else by the content."""
    salt = blake2b(cache_salt.encode(errors="replace"), digest_size=32).digest()
    content = document.file_id.encode(errors="replace") or document.data
    return blake2b(content, digest_size=32, key=salt, person=b"upload" if document.file_id else b"content").digest()


def _key_of(document: PromptDocument) -> str | bytes:
    return document.file_id or document.link or document.data


def _refuse_links(conversation: Conversation) -> None:
    """Raise BadRequest if a document is a link."""
    for document in conversation.documents:
        if document.link:
            raise BadRequest(
                f"the document at {document.path} is a link, and links are not followed to count tokens; send the "
                "document itself, as base64",
                code=INVALID_DOCUMENT,
                param=document.path.partition(".")[0],
            )


def _refusal_of(document: PromptDocument, reason: DocumentRefused) -> BadRequest:
    name = f"{document.file_id[:64]!r} at {document.path}" if document.file_id else f"at {document.path}"
    param = document.path.partition(".")[0]
    return BadRequest(f"the document {name} {reason}", code=INVALID_DOCUMENT, param=param)


def _read_conversation(conversation: Conversation, found: Sequence[Found]) -> tuple[Conversation, list[str]]:
    """Return the conversation with its documents as text, and the paths of those that are not shown.

    `found`: what each document is, in the order of the conversation. Raises why a document cannot be read.
    """
    replaced: list[str] = []
    rest = iter(found)
    messages = tuple(_read_message(message, rest, replaced) for message in conversation.messages)
    return msgspec.structs.replace(conversation, messages=messages), replaced


def _read_message(message: dict[str, Any], found: Iterator[Found], replaced: list[str]) -> dict[str, Any]:
    """Return a message with its documents as text. Paths of those that are not shown are added to `replaced`."""
    content = message["content"]
    if not isinstance(content, list) or not any(map(is_document, content)):
        return message
    is_result = message["role"] == "tool"
    read = [
        _read_part(part["document"], next(found), is_result, replaced) if is_document(part) else part
        for part in content
    ]
    parts: list[dict[str, Any]] = []
    for are_texts, group in groupby(read, is_text):
        run = list(group)
        parts += [text_part(only_text(run))] if are_texts else run
    return {**message, "content": only_text(parts)}


def _read_part(document: PromptDocument, found: Found, is_result: bool, replaced: list[str]) -> dict[str, Any]:
    """Return a part with the text of a document, or its image. Raises why it cannot be read, except in a result."""
    if isinstance(found, IsImage):
        return image_part(msgspec.structs.replace(image_of_file(document.file_id), path=document.path))
    if isinstance(found, PlatformError):
        if is_result:
            replaced.append(document.path)
            return text_part(f"[This document is not shown: {found.message}.]")
        raise found
    return text_part(shown_document(found, document.title, document.context))
