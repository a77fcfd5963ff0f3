"""Whether bytes are an adapter's tensors, as far as their head tells. Pure; the engine looks at the rest."""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec

from moiety_platform.errors import BadRequest

MAX_HEAD_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("<Q")
_TENSOR = re.compile(r".*\.lora_[AB]\.weight")


def check_config(text: str) -> None:
    """Raises BadRequest for what is no adapter_config.json of a LoRA."""
    try:
        config = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise BadRequest(f"'config' is no JSON ({exc}); send the text of adapter_config.json", param="config") from exc
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise BadRequest("'config' must be the adapter_config.json of a LoRA, with its rank 'r'", param="config")


def head_bytes(beginning: bytes) -> int:
    """How long the head is, from the first bytes of the file. Raises BadRequest."""
    if len(beginning) < _LENGTH.size:
        raise BadRequest("the upload is no safetensors file; send adapter_model.safetensors")
    (length,) = _LENGTH.unpack_from(beginning)
    if length > MAX_HEAD_BYTES:
        raise BadRequest("the upload is no safetensors file; send adapter_model.safetensors")
    return _LENGTH.size + int(length)


def check_head(head: bytes, num_bytes: int) -> None:
    """Raises BadRequest where the head is not that of so many bytes of an adapter's tensors."""
    try:
        entries: Any = msgspec.json.decode(head[_LENGTH.size :])
        ends = {name: entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"}
        last = max(ends.values(), default=0)
        is_whole = len(head) + last == num_bytes
    except (msgspec.MsgspecError, UnicodeError, RecursionError, AttributeError, LookupError, TypeError) as exc:
        raise BadRequest("the upload is no safetensors file; send adapter_model.safetensors") from exc
    if not is_whole:
        raise BadRequest(f"the upload has {num_bytes:,} bytes, and its head tells of others; send all parts once more")
    odd = sorted(str(name) for name in ends if not _TENSOR.fullmatch(str(name)))
    if odd or not ends:
        named = f"such as {odd[0][:100]!r}" if odd else "or rather none"
        raise BadRequest(f"the upload has tensors that are no LoRA factors, {named}; send adapter_model.safetensors")
