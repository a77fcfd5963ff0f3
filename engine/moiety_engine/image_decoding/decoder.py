"""The engine server's side of image processes: one process decodes one image, and how it ended is explained.

An image is refused only for what it causes itself. A process that was killed from outside, or was too slow because the
machine is busy, fails the request with an error after which the client can try again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import structlog

from moiety_engine.image_decoding.frames import DecodeOrder, DecodeReport, ImageTemplateReady
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.messages import CoreFailure
from moiety_limited_processes.errors import WorkerFailed
from moiety_limited_processes.frames import ChildExit, FrameTooLong, receive_frame, send_frame
from moiety_limited_processes.processes import (
    ForkTemplate,
    ProcessLimit,
    describe_end,
    is_own_fault,
    name_of,
    reached_limit,
)
from moiety_wire.messages import FailureCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moiety_engine.config import ImageOptions
    from moiety_wire.images import ImageInput, ImageRules
    from moiety_wire.trace_events import Reason

log = structlog.get_logger()

GRACE_S = 2.0  # beyond a process's own limit, until it is killed from here
MAX_REPORT_BYTES = 4096  # of a report, beside its pixels
DIGEST_BYTES = 32
MAX_REFUSAL_CHARS = 500
DECODER_COMPROMISED = "an image makes the decoder return something else than an image; send it in another format"
WORKER = ("-m", "moiety_engine.image_decoding.worker")
MAX_ATTEMPTS = 2  # of an image whose process was killed from outside


@dataclass(frozen=True)
class ImageFailure:
    """Why the images of a request cannot be served."""

    code: FailureCode
    message: str
    reason: Reason | None = None  # for requests that are refused at overload
    retry_after_s: float | None = None

    def of_request(self, key: int) -> CoreFailure:
        """Return the failure of the request with this key."""
        return CoreFailure(key, self.code, self.message, reason=self.reason, retry_after_s=self.retry_after_s)


class ImageDecoder:
    """Decodes images, some at a time. Owner of the template process, which starts with the first image."""

    def __init__(self, rules: ImageRules, options: ImageOptions, worker: Sequence[str] = WORKER) -> None:
        """Create the decoder. `worker`: arguments of Python that start the template process."""
        self._rules, self._options, self._worker = rules, options, worker
        self._template: ForkTemplate[ImageTemplateReady] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self.decoded_total = self.refused_total = self.failed_total = 0
        self.seconds_total = 0.0  # by the clock

    def decode(self, image: ImageInput) -> PromptImage | ImageFailure:
        """Decode one image in a new process. Blocks; for threads of one pool."""
        begun_s = time.monotonic()
        found = self._decode(image)
        with self._lock:
            self.seconds_total += time.monotonic() - begun_s
            if isinstance(found, PromptImage):
                self.decoded_total += 1
            elif found.code is FailureCode.IMAGE_REFUSED:
                self.refused_total += 1
            else:
                self.failed_total += 1
        return found

    def pixel_bytes(self, image: ImageInput) -> int:
        """Return the bytes of an image's pixels after it is decoded. Raises ValueError for a wrong head."""
        width, height = self._rules.resized(*image.size())
        return 3 * width * height

    def num_tokens(self, image: ImageInput) -> int:
        """Return the number of tokens of an image. Raises ValueError for a wrong head."""
        return self._rules.num_tokens(*image.size())

    def close(self) -> None:
        """End the template process, and with it all image processes; it does not start again. May block."""
        with self._lock:
            self._is_closed = True
            if self._template is not None:
                self._template.close()

    def _decode(self, image: ImageInput) -> PromptImage | ImageFailure:
        options = self._options
        limits = options.decode_cpu_s, options.decode_wall_s, options.decode_memory_bytes
        try:
            size = image.size()
            order = DecodeOrder(image.data, size, self._rules.resized(*size), *limits)
            for attempt in range(MAX_ATTEMPTS):
                found = self._run_order(order, is_last=attempt == MAX_ATTEMPTS - 1)
                if isinstance(found, DecodeReport):
                    return self._take_report(image.start, order, found)
                if found is not None:
                    return found
        except WorkerFailed as exc:
            return ImageFailure(FailureCode.ENGINE_FAILED, f"the image cannot be decoded now: {exc}; try again")
        except ValueError as exc:
            return ImageFailure(FailureCode.IMAGE_REFUSED, str(exc))
        raise AssertionError("the last attempt has a result")

    def _run_order(self, order: DecodeOrder, *, is_last: bool) -> DecodeReport | ImageFailure | None:
        """Return the result of one process; None if another one should try. Raises WorkerFailed."""
        template = self._started()
        template_pid = template.pid
        with template.fork() as child:
            child.link.settimeout(order.wall_s + GRACE_S)
            deadline_s = time.monotonic() + order.wall_s + GRACE_S
            max_bytes = 3 * order.resized[0] * order.resized[1] + MAX_REPORT_BYTES
            try:
                send_frame(child.link, order)
                return receive_frame(child.link, DecodeReport, deadline_s=deadline_s, max_bytes=max_bytes)
            except TimeoutError:
                end = child.kill()
                is_slow = True
            except (
                FrameTooLong,
                msgspec.MsgspecError,
            ):  # a file may take over its process, which then says what it likes
                child.kill()
                return ImageFailure(FailureCode.IMAGE_REFUSED, DECODER_COMPROMISED)
            except (EOFError, OSError):
                end = child.kill()
                is_slow = False
        log.warning("image_process_ended", ended_by="unknown" if end is None else name_of(end), is_slow=is_slow)
        if end is None:
            template.restart(template_pid)
        elif reached_limit(end) is ProcessLimit.WALL_TIME:
            is_slow = True
        elif is_own_fault(end):
            return self._refuse(end)
        if is_slow:
            message = f"decoding an image took more than {order.wall_s:g} s on this busy engine; send the request again"
            return ImageFailure(FailureCode.OVERLOADED, message)
        if is_last:
            message = "the process that decoded an image was killed; send the request again"
            return ImageFailure(FailureCode.OVERLOADED, message)
        return None

    def _take_report(self, start: int, order: DecodeOrder, report: DecodeReport) -> PromptImage | ImageFailure:
        """Return the image of a report, whose sizes are checked, since a file may have taken over the process."""
        if report.refusal:
            return ImageFailure(FailureCode.IMAGE_REFUSED, report.refusal[:MAX_REFUSAL_CHARS])
        is_right_size = (report.width, report.height) in (order.resized, order.resized[::-1])
        if not is_right_size or len(report.pixels) != 3 * report.width * report.height:
            return ImageFailure(FailureCode.IMAGE_REFUSED, DECODER_COMPROMISED)
        head = f"{report.width}x{report.height}:".encode()
        side = self._rules.patch_size * self._rules.merge_size
        return PromptImage(
            start=start,
            rows=report.height // side,
            columns=report.width // side,
            height=report.height,
            width=report.width,
            digest=blake2b(head + report.pixels, digest_size=DIGEST_BYTES).digest(),
            pixels=report.pixels,
        )

    def _started(self) -> ForkTemplate[ImageTemplateReady]:
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the engine is shutting down")
            if self._template is None:
                self._template = ForkTemplate(list(self._worker), ImageTemplateReady, lambda _: None)
            return self._template

    def _refuse(self, end: ChildExit) -> ImageFailure:
        """Return the failure of an image that ended its process by itself."""
        cpu_s, mebibytes = self._options.decode_cpu_s, self._options.decode_memory_bytes >> 20
        cost = describe_end(
            end,
            cpu_time=f"takes more than {cpu_s:g} s of processor time to decode; send a smaller one",
            memory=f"takes more than {mebibytes} MiB of memory to decode; send a smaller one",
            crash=f"crashes the decoder ({name_of(end)}); send it in another format",
        )
        return ImageFailure(FailureCode.IMAGE_REFUSED, f"an image {cost}")
