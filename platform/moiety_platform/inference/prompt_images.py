"""Images in conversations: their parts in messages, their placeholders in prompts, and the checks before a submit.

A message with images has a list of parts as its content, as chat templates take it: `{"type": "text", "text": …}` and
`{"type": "image", "data": bytes}`. The template writes one placeholder for each image. Nothing is decoded here: the
size of an image, which gives its number of tokens, is read from the head of its file.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moiety_platform.errors import BadRequest
from moiety_platform.inference.generation import Conversation, Prompt
from moiety_wire.images import ImageInput, ImageRules, image_size

NOT_SUPPORTED = "images_not_supported"  # error codes
INVALID_IMAGE = "invalid_image"

_DATA_URL = "data:image/"
_ENCODED = ";base64,"


def text_part(text: str) -> dict[str, Any]:
    """Return a part with text, for the chat template."""
    return {"type": "text", "text": text}


def image_part(data: bytes) -> dict[str, Any]:
    """Return a part with an encoded image file, for the chat template."""
    return {"type": "image", "data": data}


def decode_base64(text: str) -> bytes:
    """Return the image file. Raises ValueError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the image is not valid base64; encode the file's bytes, without line breaks") from None


def decode_data_url(url: str) -> bytes:
    """Return the image file in a data URL. Raises ValueError, also for links, which are never followed."""
    head, found, data = url.partition(_ENCODED)
    if not head.startswith(_DATA_URL) or not found:
        raise ValueError("links to images are not followed; send the image itself: data:image/png;base64,…")
    return decode_base64(data)


def images_of(prompt: Prompt) -> list[bytes]:
    """Return the image files of a conversation, in their order in its messages."""
    return list(_images_in(prompt.messages)) if isinstance(prompt, Conversation) else []


def _images_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    for message in messages:
        if isinstance(message["content"], list):
            for part in message["content"]:
                if part["type"] == "image":
                    yield part["data"]


def images_not_supported(model: str) -> BadRequest:
    """Return the error for images to a model that reads text only."""
    message = f"the model {model!r} reads text only; leave the images out, or use a model that sees"
    return BadRequest(message, code=NOT_SUPPORTED, param="messages")


def with_placeholders(token_ids: list[int], images: Sequence[bytes], rules: ImageRules, model: str) -> list[int]:
    """Return the prompt with as many placeholders for each image as it has tokens.

    Raises BadRequest for images that the model cannot read, and for a template that leaves one out.
    """
    if not images:
        return token_ids
    counts = _counts(images, rules)
    if token_ids.count(rules.image_token_id) != len(counts):
        message = f"the chat template of the model {model!r} does not show each image once; send fewer images a message"
        raise BadRequest(message, code=NOT_SUPPORTED, param="messages")
    left, expanded = iter(counts), list[int]()
    for token_id in token_ids:
        expanded += [token_id] * (next(left) if token_id == rules.image_token_id else 1)
    return expanded


def image_inputs(token_ids: Sequence[int], images: Sequence[bytes], rules: ImageRules | None) -> list[ImageInput]:
    """Return the images for the engine, each with the index of its first placeholder in the prompt."""
    if rules is None or not images:
        return []
    inputs, end, prompt_ids = [], 0, list(token_ids)
    for data in images:
        start = prompt_ids.index(rules.image_token_id, end)
        inputs.append(ImageInput(start, data))
        end = start + rules.num_tokens(*image_size(data))
    return inputs


def _counts(images: Sequence[bytes], rules: ImageRules) -> list[int]:
    """Return the number of tokens of each image. Raises BadRequest."""
    if len(images) > rules.max_images:
        raise _invalid(f"there are {len(images)} images; a request may have {rules.max_images}. Send fewer")
    if sum(map(len, images)) > rules.max_total_bytes:
        raise _invalid(f"the images have more than {rules.max_total_bytes:,} bytes together; send fewer or smaller")
    counts = []
    for number, data in enumerate(images):
        if len(data) > rules.max_bytes:
            raise _invalid(f"image {number} has {len(data):,} bytes; it may have {rules.max_bytes:,}. Make it smaller")
        try:
            width, height = image_size(data)
            if width * height > rules.max_source_pixels:
                raise ValueError(
                    f"it has {width} × {height} pixels, of which {rules.max_source_pixels:,} are allowed; scale it down"
                )
            counts.append(rules.num_tokens(width, height))
        except ValueError as exc:
            raise _invalid(f"image {number} cannot be read: {exc}") from exc
    return counts


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, code=INVALID_IMAGE, param="messages")
