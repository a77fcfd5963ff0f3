"""The number of an image's tokens follows from its size, and its size from the head of its file."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from moiety_wire.images import ImageRules, image_size

RULES = ImageRules(
    image_token_id=1, start_token_id=2, end_token_id=3, patch_size=16, merge_size=2, min_pixels=65_536,
    max_pixels=1 << 21, max_images=4, max_bytes=1 << 20, max_total_bytes=1 << 22, max_source_pixels=10**8,
)  # fmt: skip
SIDES = st.integers(1, 9000)


def file_of(size: tuple[int, int], kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (9, 200, 30)).save(buffer, kind, **options)
    return buffer.getvalue()


@given(width=SIDES, height=SIDES)
@settings(max_examples=400)
def test_an_image_is_resized_as_transformers_resizes_it(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # imports 2,000 modules

    try:
        expected = smart_resize(height, width, 32, RULES.min_pixels, RULES.max_pixels)
    except ValueError:
        with pytest.raises(ValueError, match="too narrow"):
            RULES.num_tokens(width, height)
        return
    assert RULES.resized(width, height) == expected[::-1]
    assert RULES.num_tokens(width, height) == expected[0] * expected[1] // 32**2


FORMATS = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"comment": b"a comment", "exif": b"Exif\0\0" + bytes(300)}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"lossless": True, "exif": b"Exif\0\0" + bytes(30)}),
    ("GIF", {}),
    ("GIF", {"comment": b"a comment"}),
]


@pytest.mark.parametrize(("kind", "options"), FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (37, 500), (1023, 3)])
def test_the_size_is_read_from_the_head_of_a_file(kind: str, options: dict[str, object], size: tuple[int, int]) -> None:
    assert image_size(file_of(size, kind, **options)) == size


@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_a_file_cut_at_any_byte_has_its_size_or_is_refused(kind: str, options: dict[str, object]) -> None:
    data = file_of((37, 50), kind, **options)
    for end in range(len(data)):
        try:
            assert image_size(data[:end]) == (37, 50)
        except ValueError as exc:
            assert "file" in str(exc)


@given(
    st.binary(max_size=200), st.sampled_from([b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"GIF89a", b""])
)
def test_any_bytes_have_a_size_or_are_refused(rest: bytes, head: bytes) -> None:
    try:
        width, height = image_size(head + rest)
    except ValueError:
        return
    assert width > 0
    assert height > 0


@pytest.mark.parametrize("data", [b"", b"BM" + bytes(20), b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_other_formats_are_refused_with_what_to_do(data: bytes) -> None:
    with pytest.raises(ValueError, match="convert it to one of these formats"):
        image_size(data)
