"""Images are decoded as transformers decodes them, each in a process with limits, whatever their bytes are."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import wait_for
from tests.slow_image import png_of, slow_png
from tests.vision_checkpoint import TEXT, VISION

from moiety_engine.config import ImageOptions
from moiety_engine.image_decoding.decoder import ImageDecoder, ImageFailure
from moiety_engine.image_decoding.frames import DecodeReport
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


def assert_like_transformers(made: PromptImage, data: bytes) -> None:
    """Compare the patches of a decoded file with those of transformers' image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

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


LIAR = """
import os, pathlib, socket, sys
import msgspec
from moiety_engine.image_decoding.frames import DecodeOrder, ImageTemplateReady
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.template import Template


def answer(link):
    receive_frame(link, DecodeOrder)
    send_frame(link, msgspec.Raw((pathlib.Path(__file__).parent / "answer").read_bytes()))
    os._exit(0)


control = socket.socket(fileno=int(sys.argv[1]))
send_frame(control, ImageTemplateReady())
Template(control, answer).serve()
"""


HANGING = """
import os, pathlib, signal, socket, sys
from moiety_engine.image_decoding.frames import DecodeOrder, ImageTemplateReady
from moiety_engine.image_decoding.worker import run_child
from moiety_limited_processes.frames import receive_frame, send_frame
from moiety_limited_processes.template import Template

folder = pathlib.Path(__file__).parent


def hang_or_decode(link):
    with (folder / "started").open("a+") as started:
        started.write(f"{os.getpid()}\\n")
        started.flush()
        started.seek(0)
        number = len(started.readlines())
    while number <= int((folder / "times").read_text()):
        signal.pause()
    run_child(link)


control = socket.socket(fileno=int(sys.argv[1]))
send_frame(control, ImageTemplateReady())
Template(control, hang_or_decode).serve()
"""


@pytest.mark.parametrize("size", [(37, 50), (8, 8), (300, 20), (700, 500)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_patches_are_those_of_transformers(decoder: ImageDecoder, kind: str, size: tuple[int, int]) -> None:
    data = file_of(picture(*size), kind)
    made = decoder.decode(ImageInput(7, data))
    assert isinstance(made, PromptImage)
    assert (made.start, made.num_tokens) == (7, RULES.num_tokens(*size))
    assert_like_transformers(made, data)


def gif_with_a_small_frame() -> bytes:
    """Return a GIF file whose screen is larger than its only frame."""
    data = file_of(picture(20, 20), "GIF")
    return data[:6] + (40).to_bytes(2, "little") + (30).to_bytes(2, "little") + data[10:]


def odd_files() -> dict[str, bytes]:
    """Files of every mode that Pillow finds in the four formats, besides plain RGB."""
    values = np.random.default_rng(1)
    palette = picture(40, 600).quantize(16)
    frames = [picture(40, 40, seed) for seed in (1, 2, 3)]
    return {
        "1": file_of(picture(40, 40, mode="L").convert("1")),
        "L": file_of(picture(40, 40, mode="L")),
        "L of a JPEG": file_of(picture(40, 40, mode="L"), "JPEG"),
        "I;16": file_of(Image.fromarray(values.integers(0, 65_536, (40, 40), dtype=np.uint16))),
        "LA": file_of(picture(40, 40, mode="LA")),
        "RGBA": file_of(picture(40, 600, mode="RGBA")),
        "RGBA of a WebP": file_of(picture(40, 40, mode="RGBA"), "WEBP", lossless=True),
        "P": file_of(palette),
        "P with a transparent colour": file_of(palette, transparency=3),
        "P with an alpha palette": file_of(palette, transparency=bytes(range(0, 256, 16))),
        "RGB with a transparent colour": file_of(frames[0], transparency=(1, 2, 3)),
        "CMYK": file_of(picture(40, 40, mode="CMYK"), "JPEG"),
        "animated PNG": file_of(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "GIF with a transparent colour": file_of(palette, "GIF", transparency=3),
        "GIF whose first frame covers a part": gif_with_a_small_frame(),
        "animated GIF": file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "animated WebP": file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
    }


ODD = odd_files()


@pytest.mark.parametrize("mode", ODD)
def test_other_modes_become_rgb_as_in_transformers(decoder: ImageDecoder, mode: str) -> None:
    made = decoder.decode(ImageInput(0, ODD[mode]))
    assert isinstance(made, PromptImage)
    assert_like_transformers(made, ODD[mode])


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
        (png_of(64, 64, b"\0" * 100), "cannot be decoded"),
        (file_of(picture(500, 2)), "too narrow"),
        (b"BM" + bytes(100), "convert it"),
        (png_of(20_000, 20_000, bytes(10)), "MiB of memory"),
    ],
    ids=["cut off", "too few rows", "narrow", "another format", "large"],
)
def test_bad_images_are_refused_with_the_reason(decoder: ImageDecoder, data: bytes, reason: str) -> None:
    made = decoder.decode(ImageInput(0, data))
    assert isinstance(made, ImageFailure)
    assert made.code is FailureCode.IMAGE_REFUSED
    assert reason in made.message
    assert isinstance(decoder.decode(ImageInput(0, file_of(picture(16, 16)))), PromptImage), "the next one is served"


def decode_slowly(options: ImageOptions) -> ImageFailure:
    """Decode an image that takes longer than `options` allow, and return the refusal."""
    decoder = ImageDecoder(RULES, options)
    try:
        made = decoder.decode(ImageInput(0, slow_png()))
    finally:
        decoder.close()
    assert isinstance(made, ImageFailure)
    return made


def test_a_slow_image_is_ended_by_the_limit_of_processor_time() -> None:
    failure = decode_slowly(ImageOptions(decode_cpu_s=0.05, decode_memory_bytes=1 << 30))
    assert failure.code is FailureCode.IMAGE_REFUSED
    assert "0.05 s of processor time" in failure.message


@pytest.mark.parametrize(
    "report",
    [
        DecodeReport("", 16, 16, bytes(3 * 16 * 16 - 1)),
        DecodeReport("", 1024, 16, bytes(3 * 1024 * 16)),
        DecodeReport("", -16, -16, bytes(3 * 16 * 16)),
        ["not", "a", "report"],
        7,
    ],
    ids=["too few pixels", "another size", "negative size", "another form", "a number"],
)
def test_invalid_reports_of_a_compromised_decode_process_are_refused(tmp_path: Path, report: object) -> None:
    (tmp_path / "answer").write_bytes(msgspec.msgpack.encode(report))
    (tmp_path / "worker.py").write_text(LIAR)
    decoder = ImageDecoder(RULES, OPTIONS, worker=[str(tmp_path / "worker.py")])
    try:
        made = decoder.decode(ImageInput(0, file_of(picture(16, 16))))
    finally:
        decoder.close()
    assert isinstance(made, ImageFailure)
    assert made.code is FailureCode.IMAGE_REFUSED
    assert "something else than an image" in made.message


def test_an_image_that_a_busy_machine_decodes_too_slowly_can_be_sent_again() -> None:
    failure = decode_slowly(ImageOptions(decode_wall_s=0.1, decode_memory_bytes=1 << 30))
    assert failure.code is FailureCode.OVERLOADED
    assert "send the request again" in failure.message


@pytest.mark.parametrize("times", [1, 2])
def test_an_image_whose_process_is_killed_from_outside_is_tried_again_and_then_is_no_fault_of_the_image(
    tmp_path: Path, times: int
) -> None:
    (tmp_path / "worker.py").write_text(HANGING)
    started = tmp_path / "started"
    (tmp_path / "times").write_text(str(times))

    def pids() -> list[str]:
        return started.read_text().splitlines() if started.exists() else []

    def kill_process(number: int) -> None:
        wait_for(lambda: len(pids()) > number, "the start of the next process")
        os.kill(int(pids()[number]), signal.SIGKILL)

    patient = ImageOptions(decode_cpu_s=30.0, decode_wall_s=60.0, decode_memory_bytes=1 << 30)
    decoder = ImageDecoder(RULES, patient, [str(tmp_path / "worker.py")])
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(decoder.decode, ImageInput(0, file_of(picture(16, 16))))
        for number in range(times):
            kill_process(number)
        made = result.result()
    decoder.close()
    assert len(pids()) == 2
    if times == 1:
        assert isinstance(made, PromptImage)
    else:
        assert isinstance(made, ImageFailure)
        assert made.code is FailureCode.OVERLOADED
        assert decoder.failed_total == 1
        assert decoder.refused_total == 0
