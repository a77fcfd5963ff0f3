"""Targets that read files of clients and of checkpoints: heads of images, tokenizers, GGUF headers and settings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.fuzz.mutations import of_json
from tests.fuzz.target import Take, Target, split


def open_images() -> Take:
    """The size that an image file says, and the number of tokens that follows from it."""
    from moiety_wire.images import ImageInput, ImageRules

    rules = ImageRules(image_token_id=1, start_token_id=2, end_token_id=3, patch_size=14, merge_size=2,
                       min_pixels=3136, max_pixels=12_845_056, max_images=4, max_bytes=1 << 20,
                       max_total_bytes=1 << 22, max_source_pixels=36_000_000)  # fmt: skip

    def take(data: bytes) -> None:
        if not data:
            return
        try:
            image = ImageInput(0, data)
            size = image.size()
            assert min(size) >= 1
            assert image.reference().size() == size
            width, height = rules.resized(*size)
            assert rules.num_tokens(*size) * 28 * 28 == width * height <= rules.max_pixels
        except ValueError as refused:
            assert str(refused)

    return take


def open_tokenizers() -> Take:
    """A tiktoken or sentencepiece file, made into a tokenizer that encodes."""
    from moiety_text.errors import TextError
    from moiety_text.tokenizer import Tokenizer
    from moiety_text.tokenizer_formats.files import converted_tokenizer

    folder, names = Path(tempfile.mkdtemp(prefix="moiety-fuzz-")), ("tokenizer.model", "qwen.tiktoken")

    def take(data: bytes) -> None:
        way, data = split(data, len(names))
        path = folder / names[way]
        path.write_bytes(data)
        try:
            made = converted_tokenizer(folder, {}, {})
            assert made is not None
            Tokenizer.from_json(made).encode("a b é")
        except TextError as refused:
            assert str(refused)
        finally:
            path.unlink()

    return take


def open_gguf() -> Take:
    """The header of a GGUF file, and the tokenizer's files that it has."""
    from moiety_engine.errors import CheckpointError
    from moiety_engine.gguf.header import read_header
    from moiety_engine.gguf.tokenizer import generation_defaults, tokenizer_files

    path = Path(tempfile.mkdtemp(prefix="moiety-fuzz-")) / "m.gguf"

    def take(data: bytes) -> None:
        path.write_bytes(data)
        try:
            header = read_header(path)
            generation_defaults(header)
            tokenizer_files(header)
        except CheckpointError as refused:
            assert str(refused)

    return take


def open_checkpoint_configs() -> Take:
    """config.json of a checkpoint with quantized weights."""
    from moiety_engine.errors import EngineError
    from moiety_engine.model.families import read_spec

    folder = Path(tempfile.mkdtemp(prefix="moiety-fuzz-"))

    def take(data: bytes) -> None:
        (folder / "config.json").write_bytes(data[1:])
        try:
            read_spec(folder)
        except EngineError as refused:
            assert str(refused)

    return take


def open_context_edits() -> Take:
    """Context edits of /v1/messages, made to the conversation of their request."""
    from moiety_platform.anthropic_api.schemas import MessagesBody
    from moiety_platform.errors import PlatformError
    from moiety_platform.inference.request_body import decode_body
    from moiety_platform.inference.shape_limits import DEFAULT_SHAPE

    def take(data: bytes) -> None:
        try:
            generation = decode_body(MessagesBody, data[1:], 64, DEFAULT_SHAPE).generation()
        except PlatformError as refused:
            assert refused.status in (400, 422), refused
            return
        messages = generation.prompts[0].messages
        for edit in generation.context_edits:
            edit.is_triggered(messages, 10, 100)
            edited, num_cleared = edit.edit(messages)
            assert len(edited) == len(messages)
            assert [one["role"] for one in edited] == [one["role"] for one in messages]
            assert (num_cleared > 0) == (edited != messages), (edit, messages)
            messages = edited
        json.dumps(messages)

    return take


TARGETS = (
    Target("images", "heads of image files", open_images, ("moiety_wire",)),
    Target("context_edits", "context edits of /v1/messages", open_context_edits, ("moiety_platform",), of_json),
    Target("tokenizers", "tiktoken and sentencepiece files", open_tokenizers, ("moiety_text",), max_bytes=16_384),
    Target("gguf", "headers of GGUF files", open_gguf, ("moiety_engine",), max_bytes=16_384),
    Target("configs", "config.json of quantized checkpoints", open_checkpoint_configs, ("moiety_engine",), of_json),
)
