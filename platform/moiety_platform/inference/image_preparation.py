"""Preparation of a conversation's images before its prompt is encoded: links are fetched, results are made readable.

An image in a tool's result that cannot be read is replaced by a text that says why: the client's tool has made it, and
the conversation can go on without it. Any other image that cannot be read ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from moiety_platform.inference.generation import Conversation, Generation, PromptImage
from moiety_platform.inference.image_fetcher import CannotFetch, ImageFetcher
from moiety_platform.inference.prompt_images import (
    check_file,
    check_number,
    data_url_as_json,
    has_images,
    image_part,
    images_not_supported,
    invalid_image,
    is_image,
    text_part,
)
from moiety_wire.images import ImageAllowance, ImageRules, image_digest
from moiety_wire.messages import ModelCard

TEXT_ONLY = "the model reads text only"


class ImagePreparation:
    """Preparation of images in one gateway process."""

    def __init__(self, fetcher: ImageFetcher) -> None:
        self.fetcher = fetcher

    async def prepare(self, generation: Generation, card: ModelCard, tenant_id: str) -> tuple[Generation, list[str]]:
        """Return the generation with every image as a file, and the paths of images that are replaced by a text.

        Raises BadRequest for images that the model cannot read or that cannot be fetched, and RateLimited.
        """
        prompt = generation.prompts[0]  # a chat has only one
        if not isinstance(prompt, Conversation):
            return generation, []
        prepared, replaced = await self.prepare_conversation(prompt, card, tenant_id)
        return msgspec.structs.replace(generation, prompts=(prepared,)), replaced

    async def prepare_conversation(
        self, conversation: Conversation, card: ModelCard, tenant_id: str
    ) -> tuple[Conversation, list[str]]:
        """Return the conversation with every image as a file, and the paths of images that are replaced by a text.

        Raises the errors of `prepare`.
        """
        if not conversation.images:
            return conversation, []
        rules, replaced = card.images or card.image_allowance, list[str]()
        files: dict[str, bytes | CannotFetch] = {}
        if rules is not None:
            conversation = _within_number(conversation, rules, replaced)
            links = list(dict.fromkeys(image.url for image in conversation.images if image.url))
            files = await self.fetcher.fetch_all(links, tenant_id, rules.max_bytes, rules.max_total_bytes)
        change = partial(_prepared, files, card)
        return await asyncio.to_thread(_changed, conversation, change, replaced), replaced


def prepare_count(conversation: Conversation, card: ModelCard) -> Conversation:
    """Return the conversation as `ImagePreparation` does, for a count of its tokens. It must have no links.

    Raises BadRequest for links, and for images that the model cannot read.
    """
    if not conversation.images:
        return conversation
    rules, replaced = card.images or card.image_allowance, list[str]()
    if rules is not None:
        conversation = _within_number(conversation, rules, replaced)
        for image in conversation.images:
            if image.url:
                raise invalid_image(
                    f"the image at {image.path or 'a link'} is a link, and links are not followed to count tokens; "
                    "send the image itself, as base64"
                )
    return _changed(conversation, partial(_checked, {}, card), replaced)


def _within_number(conversation: Conversation, rules: ImageRules | ImageAllowance, replaced: list[str]) -> Conversation:
    """Return the conversation with at most as many images as are allowed. Raises BadRequest."""
    conversation = _without_oldest(conversation, rules.max_images, replaced)
    check_number(len(conversation.images), rules.max_images)
    return conversation


Change = Callable[[dict[str, Any], bool], dict[str, Any]]


def _changed(conversation: Conversation, change: Change, replaced: list[str]) -> Conversation:
    """Return the conversation with each image changed by a function of its part and whether it is in a tool's result.

    Paths of images that a text replaces are added to `replaced`.
    """
    messages = []
    for message in conversation.messages:
        content = message["content"]
        if not has_images(content):
            messages.append(message)
            continue
        parts = [change(part, message["role"] == "tool") if is_image(part) else part for part in content]
        for old, new in zip(content, parts, strict=True):
            if is_image(old) and not is_image(new) and old["image"].path not in replaced:
                replaced.append(old["image"].path)
        messages.append({**message, "content": parts if has_images(parts) else _text_of(parts)})
    return msgspec.structs.replace(conversation, messages=tuple(messages))


def _without_oldest(conversation: Conversation, max_images: int, replaced: list[str]) -> Conversation:
    """Return the conversation without the oldest images of tools' results beyond a number of images in all.

    An agent that looks at more and more images can thus go on.
    """
    num_left = len(conversation.images) - max_images

    def change(part: dict[str, Any], is_result: bool) -> dict[str, Any]:
        nonlocal num_left
        if not is_result or num_left <= 0:
            return part
        num_left -= 1
        return _not_shown(f"there are {max_images} later ones, as many as a request may have")

    return conversation if num_left <= 0 else _changed(conversation, change, replaced)


def _prepared(
    files: Mapping[str, bytes | CannotFetch], card: ModelCard, part: dict[str, Any], is_result: bool
) -> dict[str, Any]:
    """Return the part as `_checked` does, with the file hashed or encoded as the engine needs it. Raises BadRequest."""
    part, rules = _checked(files, card, part, is_result), card.images or card.image_allowance
    if not is_image(part) or rules is None:
        return part
    image: PromptImage = part["image"]
    if len(image.data) > rules.max_bytes:
        return part  # refused later
    if isinstance(rules, ImageRules):
        return image_part(msgspec.structs.replace(image, digest=image_digest(image.data)))
    return image_part(msgspec.structs.replace(image, encoded=data_url_as_json(image.data)))


def _checked(
    files: Mapping[str, bytes | CannotFetch], card: ModelCard, part: dict[str, Any], is_result: bool
) -> dict[str, Any]:
    """Return the part with its image as a file, or a text in its place in a result. Raises BadRequest."""
    image: PromptImage = part["image"]
    rules = card.images or card.image_allowance
    if rules is None:
        if is_result:
            return _not_shown(TEXT_ONLY)
        raise images_not_supported(card.model)
    data = files[image.url] if image.url else image.data
    if isinstance(data, CannotFetch):
        if is_result:
            return _not_shown("its link could not be followed")
        raise invalid_image(f"the image at {image.path or 'a link'} cannot be fetched: {data}")
    if is_result:
        try:
            size = check_file(data, rules)
            if isinstance(rules, ImageRules):
                rules.num_tokens(*size)
        except ValueError as exc:
            return _not_shown(str(exc))
    return image_part(msgspec.structs.replace(image, data=data, url=""))


def _not_shown(why: str) -> dict[str, Any]:
    return text_part(f"[This image is not shown: {why}.]")


def _text_of(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
