"""Images in conversations: their parts in messages, their placeholders in prompts, and the checks before a submit.

A message with images has a list of parts as its content, as chat templates take it: `{"type": "text", "text": …}` and
`{"type": "image", "image": PromptImage}`. The template writes one placeholder for each image. Nothing is decoded here:
the size of an image, which gives its number of tokens, is read from the head of its file.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import PromptImage
from moiety_wire.images import ImageAllowance, ImageInput, ImageRules, image_size

NOT_SUPPORTED = "images_not_supported"  # error codes
INVALID_IMAGE = "invalid_image"
DATA_IMAGE = "data:image/"  # beginning of the data URL of an image
MAX_URL_CHARACTERS = 8192  # of a link

_DATA_URL = "data:"
_ENCODED = ";base64,"
LINK_PATTERN = "^https?://"  # for schemas
_LINKS = ("https://", "http://")

_TYPES = {b"\x89PNG": b"png", b"RIFF": b"webp", b"GIF8": b"gif"}  # by the beginning of the file; others are JPEG

IMAGE_URL_PATTERN = "^(data:image/[^,]*;base64,|https?://)"  # for schemas
LINK_PATTERN = "^https?://"
BASE64_PATTERN = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"


def text_part(text: str) -> dict[str, Any]:
    """Return a part with text, for the chat template."""
    return {"type": "text", "text": text}


def image_part(image: PromptImage) -> dict[str, Any]:
    """Return a part with an image, for the chat template."""
    return {"type": "image", "image": image}


def is_text(part: Mapping[str, Any]) -> bool:
    """Return whether a part is a text."""
    return bool(part["type"] == "text")


def is_image(part: Mapping[str, Any]) -> bool:
    """Return whether a part is an image."""
    return bool(part["type"] == "image")


def decode_base64(text: str, kind: str = "image") -> bytes:
    """Return the file, of an image or another kind. Raises ValueError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the {kind} is not valid base64; encode the file's bytes, without line breaks") from None


def data_url_as_json(data: bytes) -> bytes:
    """Return the data URL of an image file, as a string in JSON."""
    return b'"data:image/%s;base64,%s"' % (_TYPES.get(data[:4], b"jpeg"), base64.b64encode(data))


def image_of_url(url: str) -> PromptImage:
    """Return the image of a data URL or a link. Raises ValueError."""
    if not url.startswith(_DATA_URL):
        return image_of_link(url)
    head, found, data = url.partition(_ENCODED)
    if not head.startswith(DATA_IMAGE) or not found:
        raise ValueError("the data URL has no image in base64; send data:image/png;base64,…")
    return PromptImage(decode_base64(data))


def image_of_link(url: str) -> PromptImage:
    """Return the image at a link. Raises ValueError."""
    if not is_link(url):
        raise ValueError("the URL is neither a data URL nor a link; send data:image/png;base64,… or https://…")
    check_link(url)
    return PromptImage(source=url)


def is_link(url: str) -> bool:
    """Return whether a URL has the scheme of a link."""
    return url[:8].lower().startswith(_LINKS)


def check_link(url: str) -> None:
    """Raise ValueError for a link that is too long."""
    if len(url) > MAX_URL_CHARACTERS:
        raise ValueError(f"the link has {len(url):,} characters; it may have {MAX_URL_CHARACTERS:,}")


def image_of_file(file_id: str) -> PromptImage:
    """Return the image of an uploaded file."""
    return PromptImage(source=file_id, is_uploaded=True)


def only_text(parts: list[dict[str, Any]]) -> Any:
    """Return the content of a message with these parts: their texts joined by line breaks, if they are only texts."""
    return "\n".join(part["text"] for part in parts) if all(map(is_text, parts)) else parts


def has_images(content: Any) -> bool:
    """Return whether a message's content has images."""
    return isinstance(content, list) and any(map(is_image, content))


def joined_contents(first: Any, second: Any) -> Any:
    """Return the content of two messages as that of one: a text, or parts if one of them has parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*_parts_of(first), *_parts_of(second)]


def _parts_of(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [text_part(content)]


def images_not_supported(model: str, image: PromptImage) -> BadRequest:
    """Return the error for an image to a model that reads text only."""
    message = f"the model {model!r} reads text only; leave the images out, or use a model that sees"
    return BadRequest(message, code=NOT_SUPPORTED, param=field_of(image))


def field_of(image: PromptImage) -> str:
    """Return the request's field that has the image."""
    return image.path.partition(".")[0] or "messages"


def with_placeholders(token_ids: list[int], images: Sequence[PromptImage], rules: ImageRules, model: str) -> list[int]:
    """Return the prompt with as many placeholders for each image as it has tokens.

    Raises BadRequest for images that the model cannot read, and for a template that leaves one out.
    """
    check_together(images, rules)
    counts = [_num_tokens(number, image, rules) for number, image in enumerate(images)]
    if token_ids.count(rules.image_token_id) != len(counts):
        message = f"the chat template of the model {model!r} does not show each image once; send fewer images a message"
        raise BadRequest(message, code=NOT_SUPPORTED, param=field_of(images[0]) if images else "messages")
    left, expanded = iter(counts), list[int]()
    for token_id in token_ids:
        expanded += [token_id] * (next(left) if token_id == rules.image_token_id else 1)
    return expanded


def image_inputs(token_ids: Sequence[int], images: Sequence[PromptImage], rules: ImageRules) -> list[ImageInput]:
    """Return the images for the engine, each with the index of its first placeholder in the prompt."""
    inputs, end, prompt_ids = [], 0, list(token_ids)
    for image in images:
        start = prompt_ids.index(rules.image_token_id, end)
        inputs.append(ImageInput(start, image.data, image.digest))
        end = start + rules.num_tokens(*image_size(image.data))
    return inputs


def check_number(images: Sequence[PromptImage], max_images: int) -> None:
    """Check the number of images in a request. Raises BadRequest."""
    if len(images) > max_images:
        raise invalid_image(f"there are {len(images)} images; a request may have {max_images}. Send fewer", images[0])


def check_together(images: Sequence[PromptImage], limits: ImageRules | ImageAllowance) -> None:
    """Check the number of images and their bytes together. Raises BadRequest."""
    check_number(images, limits.max_images)
    if sum(len(image.data) for image in images) > limits.max_total_bytes:
        message = f"the images have more than {limits.max_total_bytes:,} bytes together; send fewer or smaller"
        raise invalid_image(message, images[0])


def check_file(data: bytes, limits: ImageRules | ImageAllowance) -> tuple[int, int]:
    """Return (width, height) of an image file within the limits. Raises ValueError."""
    if len(data) > limits.max_bytes:
        raise ValueError(f"it has {len(data):,} bytes; it may have {limits.max_bytes:,}. Make it smaller")
    width, height = image_size(data)
    if width * height > limits.max_source_pixels:
        raise ValueError(
            f"it has {width} × {height} pixels, of which {limits.max_source_pixels:,} are allowed; scale it down"
        )
    return width, height


def _num_tokens(number: int, image: PromptImage, rules: ImageRules) -> int:
    try:
        return rules.num_tokens(*check_file(image.data, rules))
    except ValueError as exc:
        raise invalid_image(f"image {number} cannot be read: {exc}", image) from exc


def invalid_image(message: str, image: PromptImage) -> BadRequest:
    """Return the error for an image that breaks a rule, alone or together with others."""
    return BadRequest(message, code=INVALID_IMAGE, param=field_of(image))
