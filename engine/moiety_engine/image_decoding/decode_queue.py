"""Queue of the images that wait to be decoded, and the memory that the images of open requests take.

Used by the engine server's event loop.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import structlog

from moiety_engine.image_decoding.decode_turns import DecodeTurns, ImageJob, Lane
from moiety_engine.image_decoding.decoded_images import DecodedImageCache
from moiety_engine.image_decoding.decoder import ImageDecoder, ImageFailure
from moiety_wire.classes import OverloadAction
from moiety_wire.images import image_digest
from moiety_wire.messages import FailureCode
from moiety_wire.trace_events import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moiety_engine.config import ImageOptions
    from moiety_engine.image_decoding.decode_turns import Turn
    from moiety_engine.image_decoding.decoded_images import ImageKey
    from moiety_engine.images.prompt_images import PromptImage
    from moiety_wire.images import ImageInput, ImageRules
    from moiety_wire.messages import Submit

log = structlog.get_logger()

MAX_WAIT_S = 600.0  # longest wait of a request for its images, whatever its class
RETRY_AFTER_S = 5.0
TENANTS_IN_QUEUE = 32  # the queue has room for the images of as many tenants, each with its limit


class ImageDecodeQueue:
    """Requests whose images are being decoded, image by image in the order of `DecodeTurns`.

    Files are hashed and decoded by threads, one for each slot. A tenant may have the memory divided by the number of
    tenants that have images, and one more, so that there is always room for another tenant's. `on_done` is called with
    each waiting request's key and its images, or the failure; not for a request that was forgotten. Decoded images are
    cached for the tenant's later requests.
    """

    def __init__(
        self,
        decoder: ImageDecoder,
        options: ImageOptions,
        on_done: Callable[[int, tuple[PromptImage, ...] | ImageFailure], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._decoder, self._on_done, self._clock = decoder, on_done, clock
        self._max_waiting, self._max_pixel_bytes = options.max_decoding, options.pixel_memory_bytes
        self._cache = DecodedImageCache(options.decoded_cache_bytes)
        self._held: dict[int, tuple[str, int]] = {}  # by request, until it ends: its tenant, and bytes
        self._slots = options.decode_processes
        self._threads = ThreadPoolExecutor(self._slots, thread_name_prefix="image-decoding")
        self._turns = DecodeTurns()
        self._wanted: dict[int, asyncio.TimerHandle] = {}  # by waiting request: the end of its wait
        self._running: set[asyncio.Task[None]] = set()
        self.expired_total = 0

    @classmethod
    def of(
        cls,
        rules: ImageRules,
        options: ImageOptions,
        on_done: Callable[[int, tuple[PromptImage, ...] | ImageFailure], None],
    ) -> ImageDecodeQueue:
        """Return a queue with its own decoder."""
        return cls(ImageDecoder(rules, options), options, on_done)

    def metrics(self) -> dict[str, float]:
        """Return fields of `LoadMetrics`. Callable from any thread."""
        return {
            "images_waiting_bytes": sum(self._held.get(key, ("", 0))[1] for key in list(self._wanted)),
            "decoded_image_bytes": self._cache.num_bytes,
            "decoded_image_hits_total": self._cache.hits_total,
            "decoded_image_misses_total": self._cache.misses_total,
            "decoded_image_evictions_total": self._cache.evictions_total,
            "decoded_images_total": self._decoder.decoded_total,
            "refused_images_total": self._decoder.refused_total,
            "failed_image_decodes_total": self._decoder.failed_total,
            "expired_image_waits_total": self.expired_total,
            "image_decode_seconds_total": self._decoder.seconds_total,
        }

    def lacks_images(self, submit: Submit) -> bool:
        """Return whether a request refers to an image that is not in the cache."""
        return any(not image.data and _key_of(submit, image) not in self._cache for image in submit.images)

    def queue_images(self, key: int, submit: Submit) -> tuple[PromptImage, ...] | ImageFailure | None:
        """Queue a request's images; None if it has to wait for them.

        Return the images if all are references, or why they cannot be queued now. Their heads must have been checked,
        and its references must be in the cache. Call `forget_request` at the end of the request, unless it failed here.
        """
        num_bytes = sum(len(image.data) + self._decoder.pixel_bytes(image) for image in submit.images)
        problem = self._memory_refusal(submit.tenant_id, num_bytes)
        if problem:
            return _overloaded(problem)
        job = _job_of(key, submit, self._clock())
        self._find_cached(job)
        if job.num_missing and (problem := self._queue_refusal(submit.tenant_id, job.num_missing)):
            return _overloaded(problem)
        if any(one is None and not image.data for one, image in zip(job.found, job.images, strict=True)):
            message = "the size of a referenced image differs from its file; send the file"
            return ImageFailure(FailureCode.IMAGES_MISSING, message)
        self._held[key] = submit.tenant_id, num_bytes
        if not job.num_missing:
            return tuple(one for one in job.found if one is not None)
        expire = asyncio.get_running_loop().call_later
        self._wanted[key] = expire(_timeout_s(submit), self._expire, key, _late_failure())
        self._turns.add_new(job)
        self._start_next()
        return None

    def forget_request(self, key: int) -> None:
        """Forget a request that has ended, and its images that wait; what is being decoded for it is only cached."""
        timer = self._wanted.pop(key, None)
        if timer is not None:
            timer.cancel()
        self._held.pop(key, None)
        self._turns.forget_request(key)

    def forget_tenants(self, tenant_ids: Iterable[str]) -> None:
        """Drop the cached images of these tenants, and cache none of them from now on."""
        self._cache.forget_tenants(tenant_ids)

    async def close(self) -> None:
        """End the processes, and wait for the threads."""
        for timer in self._wanted.values():
            timer.cancel()
        self._wanted.clear()
        self._turns.clear()
        await asyncio.get_running_loop().run_in_executor(None, self._decoder.close)
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown(wait=True)

    def _find_cached(self, job: ImageJob) -> None:
        """Take the images with known digests from the cache, if they have as many tokens as the request says."""
        for number, image in enumerate(job.images):
            if job.found[number] is not None or not job.digests[number]:
                continue
            found = self._cache.find_image(job.image_key(number))
            if found is not None and found.num_tokens == self._decoder.num_tokens(image):
                job.found[number] = msgspec.structs.replace(found, start=image.start)

    def _queue_refusal(self, tenant_id: str, num_images: int) -> str:
        waiting = self._turns.num_waiting()
        own = waiting[tenant_id]
        if own and own + num_images > self._max_waiting:
            return "too many images of this tenant wait to be decoded"
        if waiting and waiting.total() + num_images > TENANTS_IN_QUEUE * self._max_waiting:
            return "too many images wait to be decoded"
        return ""

    def _memory_refusal(self, tenant_id: str, num_bytes: int) -> str:
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

    def _start_next(self) -> None:
        while self._turns.num_running < self._slots and (turn := self._turns.start_next(self._clock())) is not None:
            task = asyncio.get_running_loop().create_task(self._run_turn(turn))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run_turn(self, turn: Turn) -> None:
        begun_s = self._clock()
        try:
            await self._decode_next(turn.job)
        finally:
            self._turns.end(turn, self._clock() - begun_s)
            self._start_next()

    async def _decode_next(self, job: ImageJob) -> None:
        """Decode the request's next image. It waits for its next turn with the rest."""
        try:
            if not all(job.digests):
                await self._hash_files(job)
                if job.key not in self._wanted:
                    return
            made = await self._decode_first_missing(job) if job.num_missing else None
        except Exception:  # top of an image's task: an error fails its request, not the engine
            log.exception("image_decoding_failed")
            made = ImageFailure(FailureCode.ENGINE_FAILED, "the image cannot be decoded; send the request again")
        if made is not None:
            self._report(job.key, made)
        elif not job.num_missing:
            self._report(job.key, tuple(one for one in job.found if one is not None))
        elif job.key in self._wanted:
            self._turns.add_again(job)

    async def _hash_files(self, job: ImageJob) -> None:
        """Compute the digests of the request's files, and take from the cache what is there."""
        files = {number: job.images[number].data for number, digest in enumerate(job.digests) if not digest}
        run = asyncio.get_running_loop().run_in_executor
        digests = await run(self._threads, lambda: [image_digest(data) for data in files.values()])
        for number, digest in zip(files, digests, strict=True):
            job.digests[number] = digest
        self._find_cached(job)

    async def _decode_first_missing(self, job: ImageJob) -> ImageFailure | None:
        index = job.found.index(None)
        image = job.images[index]
        made = await asyncio.get_running_loop().run_in_executor(self._threads, self._decoder.decode, image)
        if isinstance(made, ImageFailure):
            return made
        self._cache.add_image(job.image_key(index), made)
        for number, other in enumerate(job.images):  # the same file may be in the prompt several times
            if job.found[number] is None and job.digests[number] == job.digests[index]:
                job.found[number] = msgspec.structs.replace(made, start=other.start)
        return None

    def _expire(self, key: int, failure: ImageFailure) -> None:
        """Fail a request whose images were not decoded in time; its own decoding goes on until its image is done."""
        self.expired_total += 1
        self._report(key, failure)

    def _report(self, key: int, result: tuple[PromptImage, ...] | ImageFailure) -> None:
        timer = self._wanted.pop(key, None)
        if timer is not None:
            timer.cancel()
            self._on_done(key, result)


def _key_of(submit: Submit, reference: ImageInput) -> ImageKey:
    return submit.tenant_id, submit.cache_salt, reference.digest


def _job_of(key: int, submit: Submit, now_s: float) -> ImageJob:
    is_new = submit.resumed_ids is None and not submit.transfer_id
    return ImageJob(
        key,
        Lane(is_new, submit.service.rank, submit.tenant_id),
        now_s + submit.service.max_queue_s,
        submit.cache_salt,
        list(submit.images),
        [b"" if image.data else image.digest for image in submit.images],
        [None] * len(submit.images),
    )


def _late_failure() -> ImageFailure:
    """Return the failure of a request that waited too long."""
    message = "the images of the request were not decoded within the time of its class; send it again later"
    return ImageFailure(FailureCode.OVERLOADED, message, Reason.PREDICTED_LATE, RETRY_AFTER_S)


def _timeout_s(submit: Submit) -> float:
    """Return how long a request may wait for its images: until it cannot be on time, if its class then refuses it."""
    service = submit.service
    if submit.resumed_ids is not None or service.on_overload is not OverloadAction.REJECT:
        return MAX_WAIT_S
    limit_s = MAX_WAIT_S
    if service.ttft_s is not None:
        limit_s = min(limit_s, service.ttft_s + service.ttft_per_1k_s * len(submit.prompt_ids) / 1000)
    elif service.completion_s is not None:
        limit_s = min(limit_s, service.completion_s)
    if submit.deadline_unix_ns is not None:
        limit_s = min(limit_s, (submit.deadline_unix_ns - time.time_ns()) / 1e9)
    return max(0.0, limit_s)


def _overloaded(problem: str) -> ImageFailure:
    message = f"{problem}; send the request again later"
    return ImageFailure(FailureCode.OVERLOADED, message, Reason.TENANT_QUEUE_FULL, RETRY_AFTER_S)
