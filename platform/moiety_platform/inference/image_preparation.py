"""Preparation of a conversation's images before its prompt is encoded.

Linked and uploaded images become files, and images in results of tools are made readable.

An image in a tool's result that cannot be read is replaced by a text that says why: the client's tool has made it, and
the conversation can go on without it. Any other image that cannot be read ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import NotFound
from moiety_platform.inference.generation import Conversation, Generation, PromptImage
from moiety_platform.inference.link_fetcher import CannotFetch, LinkFetcher, NoSuchFile
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
FILE_NOT_FOUND = "file_not_found"  # an error code

Limits = ImageRules | ImageAllowance
Found = Mapping[str, bytes | CannotFetch]  # by link or file id
ReadUploaded = Callable[[Sequence[str], Principal, Limits], Awaitable[Found]]  # contents of files by their ids


class ImagePreparation:
    """Preparation of images in one gateway process."""

    def __init__(self, fetcher: LinkFetcher, read_uploaded: ReadUploaded) -> None:
        self.fetcher = fetcher
        self._read_uploaded = read_uploaded

    async def prepare(self, generation: Generation, card: ModelCard, owner: Principal) -> tuple[Generation, list[str]]:
        """Return the generation with every image as a file, and the paths of images that are replaced by a text.

        Raises BadRequest for images that the model cannot read or that cannot be fetched, NotFound for unknown files,
        RateLimited and Unavailable.
        """
        prompt = generation.prompts[0]  # a chat has only one
        if not isinstance(prompt, Conversation):
            return generation, []
        prepared, replaced = await self.prepare_conversation(prompt, card, owner)
        return msgspec.structs.replace(generation, prompts=(prepared,)), replaced

    async def prepare_conversation(
        self, conversation: Conversation, card: ModelCard, owner: Principal
    ) -> tuple[Conversation, list[str]]:
        """Return the conversation with every image as a file, and the paths of images that are replaced by a text.

        Raises the errors of `prepare`.
        """
        if not conversation.images:
            return conversation, []
        rules, replaced = card.images or card.image_allowance, list[str]()
        files: Found = {}
        if rules is not None:
            conversation = _within_number(conversation, rules, replaced)
            links = _sources(conversation, is_uploaded=False)
            linked = await self.fetcher.fetch_all(links, owner.tenant_id, rules.max_bytes, rules.max_total_bytes)
            files = {**linked, **await self._uploaded(conversation, owner, rules)}
        change = partial(_prepared, files, card)
        return await asyncio.to_thread(_changed, conversation, change, replaced), replaced

    async def prepare_count(self, conversation: Conversation, card: ModelCard, owner: Principal) -> Conversation:
        """Return the conversation as `prepare_conversation` does, for a count of its tokens. It must have no links.

        Raises BadRequest for links, and the errors of `prepare`.
        """
        if not conversation.images:
            return conversation
        rules, replaced = card.images or card.image_allowance, list[str]()
        files: Found = {}
        if rules is not None:
            conversation = _within_number(conversation, rules, replaced)
            for image in conversation.images:
                if image.source and not image.is_uploaded:
                    raise invalid_image(
                        f"the image at {image.path or 'a link'} is a link, and links are not followed to count tokens; "
                        "send the image itself, as base64",
                        image,
                    )
            files = await self._uploaded(conversation, owner, rules)
        return _changed(conversation, partial(_checked, files, card), replaced)

    async def _uploaded(self, conversation: Conversation, owner: Principal, rules: Limits) -> Found:
        file_ids = _sources(conversation, is_uploaded=True)
        return await self._read_uploaded(file_ids, owner, rules) if file_ids else {}


def _sources(conversation: Conversation, *, is_uploaded: bool) -> list[str]:
    """Return the different links of the images, or the ids of uploaded files."""
    images = (image for image in conversation.images if image.source and image.is_uploaded == is_uploaded)
    return list(dict.fromkeys(image.source for image in images))


def _within_number(conversation: Conversation, rules: Limits, replaced: list[str]) -> Conversation:
    """Return the conversation with at most as many images as are allowed. Raises BadRequest."""
    conversation = _without_oldest(conversation, rules.max_images, replaced)
    check_number(conversation.images, rules.max_images)
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
        return _not_shown(f"{max_images} later images are shown, the limit of a request")

    return conversation if num_left <= 0 else _changed(conversation, change, replaced)


def _prepared(files: Found, card: ModelCard, part: dict[str, Any], is_result: bool) -> dict[str, Any]:
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


def _checked(files: Found, card: ModelCard, part: dict[str, Any], is_result: bool) -> dict[str, Any]:
    """Return the part with its image as a file, or a text in its place in a result. Raises BadRequest or NotFound."""
    image: PromptImage = part["image"]
    rules = card.images or card.image_allowance
    if rules is None:
        if is_result:
            return _not_shown(TEXT_ONLY)
        raise images_not_supported(card.model, image)
    data = files[image.source] if image.source else image.data
    if isinstance(data, CannotFetch):
        if is_result:
            return _not_shown("its file cannot be read" if image.is_uploaded else "its link could not be followed")
        message = f"the image at {image.path or 'a link'} cannot be fetched: {data}"
        raise NotFound(message, code=FILE_NOT_FOUND) if isinstance(data, NoSuchFile) else invalid_image(message, image)
    if is_result or image.is_uploaded:
        try:
            size = check_file(data, rules)
            if isinstance(rules, ImageRules):
                rules.num_tokens(*size)
        except ValueError as exc:
            if is_result:
                return _not_shown(str(exc))
            raise invalid_image(f"the image at {image.path} cannot be read: {exc}", image) from exc
    return image_part(msgspec.structs.replace(image, data=data, source=""))


def _not_shown(why: str) -> dict[str, Any]:
    return text_part(f"[This image is not shown: {why}.]")


def _text_of(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
