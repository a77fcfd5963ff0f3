"""Requests wait for their images by class and tenant, within limits, and each image is decoded once a conversation."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from tests.slow_image import slow_png
from tests.wire_submits import wire_submit

from moiety_engine.config import ImageOptions
from moiety_engine.image_decoding import decode_queue
from moiety_engine.image_decoding.decode_queue import ImageDecodeQueue
from moiety_engine.image_decoding.decoder import ImageDecoder, ImageFailure
from moiety_engine.images.prompt_images import PromptImage
from moiety_wire.classes import BATCH, FLEX, STANDARD, ServiceClass
from moiety_wire.images import ImageInput, ImageRules, image_digest
from moiety_wire.messages import FailureCode, Submit
from moiety_wire.trace_events import Reason

RULES = ImageRules(
    image_token_id=1, start_token_id=2, end_token_id=3, patch_size=4, merge_size=2, min_pixels=256,
    max_pixels=40_000, max_images=4, max_bytes=1 << 20, max_total_bytes=1 << 22, max_source_pixels=10**8,
)  # fmt: skip
PIXEL_BYTES = 16 * 16 * 3
PATIENT = msgspec.structs.replace(STANDARD, ttft_s=None)  # its requests do not fail on a busy machine


def picture(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    values = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(values).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def asks(tenant: str, *files: bytes | ImageInput, service: ServiceClass = BATCH, **changes: Any) -> Submit:
    images = [ImageInput(8 * number, one) if isinstance(one, bytes) else one for number, one in enumerate(files)]
    fields = {"tenant_id": tenant, "service": service, "prompt_ids": [1] * 40, "images": images}
    return wire_submit(**{**fields, **changes})


class Decoding:
    """A decode queue and the messages that it has reported."""

    def __init__(self, **options: Any) -> None:
        self.done: dict[int, tuple[PromptImage, ...] | ImageFailure] = {}
        self._changed = asyncio.Event()
        limits = ImageOptions(**{"decode_processes": 1, "decode_memory_bytes": 1 << 30, **options})
        self.queue = ImageDecodeQueue(ImageDecoder(RULES, limits), limits, self._on_done)

    def _on_done(self, key: int, result: tuple[PromptImage, ...] | ImageFailure) -> None:
        self.done[key] = result
        self._changed.set()

    async def until(self, *keys: int) -> None:
        async with asyncio.timeout(60):
            while not set(keys) <= set(self.done):
                self._changed.clear()
                await self._changed.wait()

    async def decode(self, key: int, submit: Submit) -> tuple[PromptImage, ...] | ImageFailure:
        found = self.queue.queue_images(key, submit)
        if found is None:
            await self.until(key)
            found = self.done[key]
        self.queue.forget_request(key)
        return found


@pytest.fixture
async def decoding() -> Any:
    made: list[Decoding] = []

    def make(**options: Any) -> Decoding:
        made.append(Decoding(**options))
        return made[-1]

    yield make
    for one in made:
        await one.queue.close()


Make = Callable[..., Decoding]


def figure(decoding: Decoding, name: str) -> float:
    return decoding.queue.metrics()[name]


async def test_tenants_take_turns_and_requests_that_left_are_not_reported(decoding: Make) -> None:
    one = decoding(max_decoding=3)
    assert [one.queue.queue_images(key, asks("a", picture(key))) for key in (1, 2, 3, 4)] == [None] * 4
    refused = one.queue.queue_images(5, asks("a", picture(5)))
    assert isinstance(refused, ImageFailure)
    assert (refused.code, refused.reason) == (FailureCode.OVERLOADED, Reason.TENANT_QUEUE_FULL)
    assert "too many images of this tenant" in refused.message
    assert one.queue.queue_images(6, asks("b", picture(6))) is None
    one.queue.forget_request(3)
    await one.until(1, 2, 4, 6)
    order = list(one.done)
    assert sorted(order) == [1, 2, 4, 6]
    assert order.index(6) < order.index(4)


async def test_the_queue_of_all_tenants_is_bounded(decoding: Make) -> None:
    one = decoding(max_decoding=1)
    found = [one.queue.queue_images(key, asks(f"tenant {key}", picture(key))) for key in range(40)]
    refused = [result for result in found if isinstance(result, ImageFailure)]
    assert len(refused) == 40 - 33  # one is being decoded, and 32 wait
    assert all("too many images wait" in result.message for result in refused)


async def test_the_images_of_open_requests_stay_within_their_memory_and_leave_room_for_another_tenant(
    decoding: Make,
) -> None:
    file = picture()
    one = decoding(pixel_memory_bytes=4 * (len(file) + PIXEL_BYTES))

    def problem(key: int, tenant: str) -> str:
        found = one.queue.queue_images(key, asks(tenant, file))
        return found.message if isinstance(found, ImageFailure) else ""

    assert problem(1, "a") == problem(2, "a") == ""
    assert "this tenant's open requests" in problem(3, "a")
    assert problem(4, "b") == problem(5, "c") == ""
    assert "take all memory" in problem(6, "d")
    one.queue.forget_request(1)
    assert problem(7, "d") == ""


async def test_tenants_take_turns_image_by_image(decoding: Make) -> None:
    one = decoding()
    assert one.queue.queue_images(1, asks("a", *map(picture, range(8)))) is None
    assert one.queue.queue_images(2, asks("b", picture(9))) is None
    await one.until(1, 2)
    assert list(one.done) == [2, 1]


async def test_a_more_critical_class_is_decoded_first(decoding: Make) -> None:
    one = decoding()
    for key, service in ((1, BATCH), (2, BATCH), (3, FLEX), (4, PATIENT)):
        assert one.queue.queue_images(key, asks(f"tenant {key}", picture(key), service=service)) is None
    await one.until(1, 2, 3, 4)
    assert list(one.done) == [1, 4, 3, 2]


async def test_a_request_that_waited_longer_than_its_class_allows_comes_before_more_critical_ones(
    decoding: Make,
) -> None:
    one = decoding()
    soon = msgspec.structs.replace(BATCH, max_queue_s=1e-9)
    for key, service in ((1, BATCH), (2, soon), (3, PATIENT)):
        assert one.queue.queue_images(key, asks(f"tenant {key}", picture(key), service=service)) is None
    await one.until(1, 2, 3)
    assert list(one.done) == [1, 2, 3]


async def test_a_request_that_cannot_be_on_time_any_more_fails_while_it_waits_if_its_class_rejects(
    decoding: Make,
) -> None:
    one = decoding()
    hurried = ServiceClass(name="hurried", rank=5, ttft_s=0.05)
    patient = msgspec.structs.replace(BATCH, rank=9)
    assert one.queue.queue_images(1, asks("a", slow_png(), service=patient)) is None
    assert one.queue.queue_images(2, asks("b", picture(2), service=hurried)) is None
    assert one.queue.queue_images(3, asks("b", picture(3), service=hurried, resumed_ids=[5])) is None
    await one.until(1, 2, 3)
    assert list(one.done) == [2, 1, 3]
    expired = one.done[2]
    assert isinstance(expired, ImageFailure)
    assert (expired.code, expired.reason) == (FailureCode.OVERLOADED, Reason.PREDICTED_LATE)
    assert isinstance(one.done[3], tuple)
    assert figure(one, "expired_image_waits_total") == 1


async def test_requests_that_another_engine_began_are_decoded_first(decoding: Make) -> None:
    one = decoding()
    for key, changes in ((1, {}), (2, {}), (3, {"transfer_id": "t"}), (4, {"resumed_ids": [5]})):
        assert one.queue.queue_images(key, asks(f"tenant {key}", picture(key), **changes)) is None
    await one.until(1, 2, 3, 4)
    assert list(one.done) == [1, 3, 4, 2]


async def test_files_are_hashed_by_threads_and_not_those_of_refused_requests(
    decoding: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[tuple[bytes, bool]] = []

    def digest(data: bytes) -> bytes:
        hashed.append((data, threading.current_thread() is threading.main_thread()))
        return image_digest(data)

    monkeypatch.setattr(decode_queue, "image_digest", digest)
    one = decoding(max_decoding=1)
    files = [picture(key) for key in range(3)]
    found = [one.queue.queue_images(key, asks("a", file)) for key, file in enumerate(files)]
    assert found[:2] == [None, None]
    assert isinstance(found[2], ImageFailure)
    assert not hashed
    await one.until(0, 1)
    assert hashed == [(file, False) for file in files[:2]]


async def test_a_conversation_decodes_its_image_once(decoding: Make) -> None:
    one = decoding()
    files = [picture(number) for number in range(3)]
    for turn in range(20):
        found = await one.decode(turn, asks("a", *files[: 1 + turn // 8]))
        assert isinstance(found, tuple)
        assert [image.start for image in found] == [8 * number for number in range(len(found))]
    assert figure(one, "decoded_images_total") == 3
    assert figure(one, "decoded_image_bytes") == 3 * PIXEL_BYTES


async def test_a_file_that_is_in_a_prompt_twice_is_decoded_once(decoding: Make) -> None:
    one = decoding()
    first, other, again = await one.decode(1, asks("a", picture(1), picture(2), picture(1)))  # type: ignore[misc]
    assert first.pixels == again.pixels != other.pixels
    assert (first.start, again.start) == (0, 16)
    assert figure(one, "decoded_images_total") == 2


@pytest.mark.parametrize("other", [{"tenant_id": "b"}, {"cache_salt": b"another"}])
async def test_images_are_found_with_their_own_tenant_and_salt_only(decoding: Make, other: dict[str, Any]) -> None:
    one = decoding()
    reference = ImageInput(0, picture()).reference()
    await one.decode(1, asks("a", picture()))
    assert not one.queue.lacks_images(asks("a", reference))
    assert one.queue.lacks_images(asks("a", reference, **other))
    assert one.queue.queue_images(2, asks("a", picture(), **other)) is None


async def test_a_reference_gives_the_image_that_its_file_gives(decoding: Make) -> None:
    one = decoding()
    expected = await one.decode(1, asks("a", picture()))
    assert await one.decode(2, asks("a", ImageInput(0, picture()).reference())) == expected


async def test_a_reference_with_a_wrong_size_is_answered_as_missing(decoding: Make) -> None:
    one = decoding()
    await one.decode(1, asks("a", picture()))
    wrong = msgspec.structs.replace(ImageInput(0, picture()).reference(), width=160)
    found = one.queue.queue_images(2, asks("a", wrong))
    assert isinstance(found, ImageFailure)
    assert found.code is FailureCode.IMAGES_MISSING


async def test_decoded_images_stay_within_their_memory(decoding: Make) -> None:
    one = decoding(decoded_cache_bytes=2 * PIXEL_BYTES)
    for key in range(4):
        await one.decode(key, asks("a", picture(key)))
        assert figure(one, "decoded_image_bytes") <= 2 * PIXEL_BYTES
    assert figure(one, "decoded_image_evictions_total") == 2
    assert [one.queue.lacks_images(asks("a", ImageInput(0, picture(key)).reference())) for key in range(4)] == [
        True, True, False, False,
    ]  # fmt: skip


async def test_nothing_is_kept_with_a_cache_of_no_bytes(decoding: Make) -> None:
    one = decoding(decoded_cache_bytes=0)
    assert await one.decode(1, asks("a", picture())) == await one.decode(2, asks("a", picture()))
    assert figure(one, "decoded_images_total") == 2


async def test_a_deleted_tenant_leaves_no_decoded_image_also_of_a_request_that_runs_meanwhile(decoding: Make) -> None:
    one = decoding()
    await one.decode(1, asks("a", picture(1)))
    await one.decode(2, asks("b", picture(2)))
    running: Awaitable[Any] = asyncio.ensure_future(one.decode(3, asks("a", picture(3))))
    await asyncio.sleep(0)
    one.queue.forget_tenants(["a"])
    assert isinstance(await running, tuple)
    assert figure(one, "decoded_image_bytes") == PIXEL_BYTES
    assert one.queue.lacks_images(asks("a", ImageInput(0, picture(1)).reference()))
    assert one.queue.lacks_images(asks("a", ImageInput(0, picture(3)).reference()))
