"""Images are decoded as transformers decodes them, each in a process with limits, whatever their bytes are."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from tests.vision_checkpoint import TEXT, VISION
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from moiety_engine.config import ImageOptions
from moiety_engine.image_decoding.decoder import ImageDecodeQueue, ImageDecoder, ImageFailure
from moiety_engine.images.prompt_images import PromptImage
from moiety_engine.model.families import spec_from_config
from moiety_engine.model.vision_encoder import patches_of
from moiety_wire.images import ImageInput, ImageRules
from moiety_wire.messages import FailureCode

RULES = ImageRules(
    image_token_id=1, start_token_id=2, end_token_id=3, patch_size=4, merge_size=2, min_pixels=256,
    max_pixels=40_000, max_images=4, max_bytes=1 << 20, max_total_bytes=1 << 22, max_source_pixels=10**8,
)  # fmt: skip
OPTIONS = ImageOptions(decode_cpu_s=2.0, decode_memory_bytes=64 << 20)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(RULES, OPTIONS)
    yield decoder
    decoder.close()


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    channels = len(mode)
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze() if channels == 1 else values, mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def forged_png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG whose head says a size that its data may not have."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(37, 50), (8, 8), (300, 20), (700, 500)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_patches_are_those_of_transformers(decoder: ImageDecoder, kind: str, size: tuple[int, int]) -> None:
    data = file_of(picture(*size), kind)
    made = decoder.decode(ImageInput(7, data))
    assert isinstance(made, PromptImage)
    assert (made.start, made.num_tokens) == (7, RULES.num_tokens(*size))
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 40_000}, image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )  # fmt: skip
    expected = processor(images=[Image.open(io.BytesIO(data))], return_tensors="pt")
    vision = spec_from_config({"model_type": "qwen3_vl_moe", "text_config": TEXT, "vision_config": VISION}).vision
    assert vision is not None
    pixels = torch.frombuffer(bytearray(made.pixels), dtype=torch.uint8).view(made.height, made.width, 3)
    patches, grid = patches_of(pixels, vision)
    assert expected["image_grid_thw"].tolist() == [[1, *grid]]
    assert (patches - expected["pixel_values"]).abs().max().item() <= 1e-5


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_other_modes_become_rgb(decoder: ImageDecoder, mode: str) -> None:
    made = decoder.decode(ImageInput(0, file_of(picture(40, 40, mode=mode))))
    assert isinstance(made, PromptImage)
    assert len(made.pixels) == 40 * 40 * 3


def test_an_image_is_turned_upright_and_has_as_many_tokens(decoder: ImageDecoder) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90°
    flat = picture(80, 40)
    turned = decoder.decode(ImageInput(0, file_of(flat, "PNG", exif=exif)))
    expected = decoder.decode(ImageInput(0, file_of(flat.transpose(Image.Transpose.ROTATE_270))))
    assert isinstance(turned, PromptImage)
    assert turned == expected
    assert (turned.rows, turned.columns) == (10, 5)


def test_equal_pixels_have_equal_digests_and_others_have_not(decoder: ImageDecoder) -> None:
    made = [
        decoder.decode(ImageInput(0, file_of(picture(40, 24, seed), "PNG", compress_level=level)))
        for seed, level in ((1, 1), (1, 9), (2, 1))
    ]
    first, same, other = [one.digest for one in made if isinstance(one, PromptImage)]
    assert first == same != other


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (file_of(picture(64, 64))[:900], "cannot be decoded"),
        (forged_png(64, 64, b"\0" * 100), "cannot be decoded"),
        (file_of(picture(500, 2)), "too narrow"),
        (b"GIF89a" + bytes(100), "convert it"),
        (forged_png(20_000, 20_000, bytes(10)), "MiB of memory"),
    ],
    ids=["cut off", "too few rows", "narrow", "another format", "large"],
)
def test_bad_images_are_refused_with_the_reason(decoder: ImageDecoder, data: bytes, reason: str) -> None:
    made = decoder.decode(ImageInput(0, data))
    assert isinstance(made, ImageFailure)
    assert made.code is FailureCode.INVALID_REQUEST
    assert reason in made.message
    assert isinstance(decoder.decode(ImageInput(0, file_of(picture(16, 16)))), PromptImage), "the next one is served"


def test_a_slow_image_is_ended_by_the_limit_of_processor_time() -> None:
    decoder = ImageDecoder(RULES, ImageOptions(decode_cpu_s=0.1, decode_memory_bytes=1 << 30))
    try:
        made = decoder.decode(ImageInput(0, file_of(picture(7000, 7000), "PNG", compress_level=1)))
        assert isinstance(made, ImageFailure)
        assert "0.1 s of processor time" in made.message
    finally:
        decoder.close()


async def test_tenants_take_turns_and_requests_that_left_are_not_reported() -> None:
    done: list[int] = []
    is_all = asyncio.Event()

    def on_done(key: int, result: list[PromptImage] | ImageFailure) -> None:
        done.append(key)
        if len(done) == 4:
            is_all.set()

    options = ImageOptions(decode_processes=1, max_decoding=3)
    queue = ImageDecodeQueue(ImageDecoder(RULES, options), options, on_done)
    image = [ImageInput(0, file_of(picture(16, 16)))]
    assert [queue.queue_images(key, "a", image) for key in (1, 2, 3, 4)] == [""] * 4
    assert "too many images of this tenant" in queue.queue_images(5, "a", image)
    assert queue.queue_images(6, "b", image) == ""
    queue.forget_request(3)
    async with asyncio.timeout(60):
        await is_all.wait()
    assert sorted(done) == [1, 2, 4, 6]
    assert done.index(6) < done.index(4)
    await queue.close()


async def test_the_images_of_open_requests_stay_within_their_memory_and_leave_room_for_another_tenant() -> None:
    file = file_of(picture(16, 16))
    options = ImageOptions(pixel_memory_bytes=4 * (len(file) + 16 * 16 * 3))
    queue = ImageDecodeQueue(ImageDecoder(RULES, options), options, lambda key, result: None)
    image = [ImageInput(0, file)]
    assert queue.queue_images(1, "a", image) == queue.queue_images(2, "a", image) == ""
    assert "this tenant's open requests" in queue.queue_images(3, "a", image)
    assert queue.queue_images(4, "b", image) == queue.queue_images(5, "c", image) == ""
    assert "take all memory" in queue.queue_images(6, "d", image)
    queue.forget_request(1)
    assert queue.queue_images(7, "d", image) == ""
    await queue.close()


async def test_tenants_take_turns_image_by_image() -> None:
    done: list[int] = []
    is_all = asyncio.Event()

    def on_done(key: int, result: list[PromptImage] | ImageFailure) -> None:
        assert isinstance(result, list)
        done.append(key)
        if len(done) == 2:
            is_all.set()

    options = ImageOptions(decode_processes=1)
    queue = ImageDecodeQueue(ImageDecoder(RULES, options), options, on_done)
    image = ImageInput(0, file_of(picture(16, 16)))
    assert queue.queue_images(1, "a", [image] * 8) == queue.queue_images(2, "b", [image]) == ""
    async with asyncio.timeout(60):
        await is_all.wait()
    assert done == [2, 1]
    await queue.close()
