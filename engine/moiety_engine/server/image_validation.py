"""Validation of a prompt's images against the model's rules, by the heads of their files. Without side effects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_wire.images import DIGEST_BYTES

if TYPE_CHECKING:
    from moiety_wire.images import ImageInput, ImageRules
    from moiety_wire.messages import Submit


def images_complaint(submit: Submit, rules: ImageRules | None) -> str:
    """Return why the images cannot be served; "" if they can, as far as can be said without decoding them."""
    if not submit.images:
        return ""
    if rules is None:
        return "this model does not take images; send the request to a model that does, or leave them out"
    if len(submit.images) > rules.max_images:
        return f"the prompt has {len(submit.images)} images; at most {rules.max_images} are allowed"
    num_bytes = sum(len(image.data) for image in submit.images)
    if num_bytes > rules.max_total_bytes:
        return f"the images have {num_bytes:,} bytes; at most {rules.max_total_bytes:,} are allowed in one prompt"
    return _places_complaint(submit, rules)


def _places_complaint(submit: Submit, rules: ImageRules) -> str:
    """Return why an image or its placeholders are wrong; "" if they are right."""
    end = 0
    for number, image in enumerate(submit.images, 1):
        if image.start < end:
            return f"image {number} starts at token {image.start}, before the end of the image before it"
        num_tokens, complaint = _num_tokens(image, rules)
        if complaint:
            return f"image {number}: {complaint}"
        end = image.start + num_tokens
        places = submit.prompt_ids[image.start : end]
        if len(places) < num_tokens or any(token_id != rules.image_token_id for token_id in places):
            return (
                f"image {number} takes {num_tokens} tokens, but the prompt does not have as many placeholders "
                f"(token {rules.image_token_id}) from token {image.start} on"
            )
    return ""


def _num_tokens(image: ImageInput, rules: ImageRules) -> tuple[int, str]:
    """Return the image's number of tokens, or why it cannot be served."""
    if not image.data and len(image.digest) != DIGEST_BYTES:
        return 0, "it has neither a file nor the digest of one"
    if len(image.data) > rules.max_bytes:
        return 0, f"the file has {len(image.data):,} bytes; at most {rules.max_bytes:,} are allowed"
    try:
        width, height = image.size()
        if width * height > rules.max_source_pixels:
            return 0, (
                f"it has {width} × {height} pixels; at most {rules.max_source_pixels:,} are allowed: make it smaller"
            )
        return rules.num_tokens(width, height), ""
    except ValueError as exc:
        return 0, str(exc)
