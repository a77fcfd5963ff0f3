"""The engine server's side of image processes: one process decodes one image, and the result is checked.

A queue holds what waits, by tenant, and takes from the tenants in turn. Used by the engine server's event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import structlog

from moiety_engine.image_decoding.frames import DecodeOrder, DecodeReport, ImageTemplateReady
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.limited_processes.errors import WorkerFailed
from moiety_engine.limited_processes.frames import receive_frame, send_frame
from moiety_engine.limited_processes.processes import ForkTemplate, name_of
from moiety_wire.images import image_size
from moiety_wire.messages import FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_engine.config import ImageOptions
    from moiety_wire.images import ImageInput, ImageRules

log = structlog.get_logger()

GRACE_S = 2.0  # beyond a process's own limit, until it is killed from here
DIGEST_BYTES = 32


@dataclass(frozen=True)
class ImageFailure:
    """Why the images of a request cannot be served."""

    code: FailureCode
    message: str


@dataclass
class _Job:
    key: int
    tenant_id: str
    images: deque[ImageInput]  # those that are not decoded yet
    found: list[PromptImage]


class ImageDecoder:
    """Decodes images, some at a time. Owner of the template process, which starts with the first image."""

    def __init__(self, rules: ImageRules, options: ImageOptions) -> None:
        self._rules, self._options = rules, options
        self._template: ForkTemplate[ImageTemplateReady] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def decode(self, image: ImageInput) -> PromptImage | ImageFailure:
        """Decode one image in a new process. Blocks; for threads of one pool."""
        rules, options = self._rules, self._options
        try:
            size = image_size(image.data)
            resized = rules.resized(*size)
            with self._started().fork() as child:
                child.link.settimeout(options.decode_wall_s + GRACE_S)
                limits = options.decode_cpu_s, options.decode_wall_s, options.decode_memory_bytes
                try:
                    send_frame(child.link, DecodeOrder(image.data, size, resized, *limits))
                    report = receive_frame(child.link, DecodeReport)
                except (EOFError, OSError):
                    end = child.kill()
                    log.warning("image_process_ended", end="unknown" if end is None else name_of(end))
                    return self._too_costly()
        except WorkerFailed as exc:
            return ImageFailure(FailureCode.ENGINE_FAILED, f"the image cannot be decoded now: {exc}; try again")
        except ValueError as exc:
            return ImageFailure(FailureCode.INVALID_REQUEST, str(exc))
        if report.refusal:
            return ImageFailure(FailureCode.INVALID_REQUEST, report.refusal)
        head = f"{report.width}x{report.height}:".encode()
        side = rules.patch_size * rules.merge_size
        return PromptImage(
            start=image.start,
            rows=report.height // side,
            columns=report.width // side,
            height=report.height,
            width=report.width,
            digest=blake2b(head + report.pixels, digest_size=DIGEST_BYTES).digest(),
            pixels=report.pixels,
        )

    def pixel_bytes(self, image: ImageInput) -> int:
        """Return the bytes of an image's pixels after it is decoded. Raises ValueError for a wrong head."""
        width, height = self._rules.resized(*image_size(image.data))
        return 3 * width * height

    def close(self) -> None:
        """End the template process, and with it all image processes; it does not start again. May block."""
        with self._lock:
            self._is_closed = True
            if self._template is not None:
                self._template.close()

    def _started(self) -> ForkTemplate[ImageTemplateReady]:
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the engine is shutting down")
            if self._template is None:
                command = ["-m", "moiety_engine.image_decoding.worker"]
                self._template = ForkTemplate(command, ImageTemplateReady, lambda _: None)
            return self._template

    def _too_costly(self) -> ImageFailure:
        options = self._options
        return ImageFailure(
            FailureCode.INVALID_REQUEST,
            f"an image takes more than {options.decode_cpu_s:g} s of processor time or more than "
            f"{options.decode_memory_bytes >> 20} MiB of memory to decode; send a smaller one",
        )


class ImageDecodeQueue:
    """Requests whose images are being decoded, and the memory that the images of open requests take.

    Tenants take turns image by image. A tenant may have the memory divided by the number of tenants that have images,
    and one more, so that there is always room for another tenant's. `on_done` is called with each request's key and its
    images, or the failure; not for a request that has left. Used by one event loop.
    """

    def __init__(
        self,
        decoder: ImageDecoder,
        options: ImageOptions,
        on_done: Callable[[int, list[PromptImage] | ImageFailure], None],
    ) -> None:
        self._decoder, self._on_done = decoder, on_done
        self._max_waiting, self._max_pixel_bytes = options.max_decoding, options.pixel_memory_bytes
        self._held: dict[int, tuple[str, int]] = {}  # by request, until it ends: its tenant, and bytes
        self._slots = options.decode_processes
        self._threads = ThreadPoolExecutor(self._slots, thread_name_prefix="image-decoding")
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant; the tenant whose turn it is comes first
        self._wanted: set[int] = set()
        self._running: set[asyncio.Task[None]] = set()

    def queue_images(self, key: int, tenant_id: str, images: list[ImageInput]) -> str:
        """Queue a request's images. Return why they cannot be queued now; "" if they are.

        Their heads must have been checked. Call `forget_request` at the end of a request that is queued.
        """
        jobs = self._waiting.get(tenant_id, ())
        if jobs and sum(len(job.images) for job in jobs) + len(images) > self._max_waiting:
            return "too many images of this tenant wait to be decoded"
        num_bytes = sum(len(image.data) + self._decoder.pixel_bytes(image) for image in images)
        if problem := self._why_no_memory(tenant_id, num_bytes):
            return problem
        self._held[key] = tenant_id, num_bytes
        self._waiting.setdefault(tenant_id, deque()).append(_Job(key, tenant_id, deque(images), []))
        self._wanted.add(key)
        self._start_next()
        return ""

    def forget_request(self, key: int) -> None:
        """Forget a request that has ended, and its images that wait; what is being decoded for it is discarded."""
        self._wanted.discard(key)
        tenant_id, _ = self._held.pop(key, ("", 0))
        if (jobs := self._waiting.get(tenant_id)) is not None:
            left = deque(job for job in jobs if job.key != key)
            if left:
                self._waiting[tenant_id] = left
            else:
                del self._waiting[tenant_id]

    def _why_no_memory(self, tenant_id: str, num_bytes: int) -> str:
        held: dict[str, int] = {}
        for holder, its_bytes in self._held.values():
            held[holder] = held.get(holder, 0) + its_bytes
        if not held:
            return ""  # a prompt by itself is bounded by the rules
        own, num_tenants = held.get(tenant_id, 0), len(held.keys() | {tenant_id})
        if own and own + num_bytes > self._max_pixel_bytes // (num_tenants + 1):
            return "the images of this tenant's open requests take its share of the memory for images"
        if sum(held.values()) + num_bytes > self._max_pixel_bytes:
            return "the images of open requests take all memory for images"
        return ""

    async def close(self) -> None:
        """End the processes, and wait for the threads."""
        self._wanted.clear()
        self._waiting.clear()
        await asyncio.get_running_loop().run_in_executor(None, self._decoder.close)
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown(wait=True)

    def _start_next(self) -> None:
        while len(self._running) < self._slots and self._waiting:
            tenant_id, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            del self._waiting[tenant_id]
            if jobs:
                self._waiting[tenant_id] = jobs  # behind the other tenants
            if job.key in self._wanted:
                task = asyncio.get_running_loop().create_task(self._run(job))
                self._running.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("image_decoding_failed", reason=repr(problem))
        self._start_next()

    async def _run(self, job: _Job) -> None:
        """Decode the request's next image. It waits for its next turn with the rest."""
        loop = asyncio.get_running_loop()
        one = await loop.run_in_executor(self._threads, self._decoder.decode, job.images.popleft())
        if isinstance(one, ImageFailure):
            self._report(job.key, one)
            return
        job.found.append(one)
        if not job.images:
            self._report(job.key, job.found)
        elif job.key in self._wanted:
            self._waiting.setdefault(job.tenant_id, deque()).appendleft(job)

    def _report(self, key: int, result: list[PromptImage] | ImageFailure) -> None:
        if key in self._wanted:
            self._wanted.discard(key)
            self._on_done(key, result)
