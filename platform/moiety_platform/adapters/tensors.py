"""Check of an adapter's safetensors header. Pure; the engine checks the rest."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import msgspec

from moiety_platform.adapters.magnitudes import MAX_GAIN
from moiety_platform.errors import BadRequest

DEFAULT_ALPHA = 8  # PEFT's default
MAX_HEAD_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct("<Q")
_TENSOR = re.compile(r".*\.lora_[AB]\.weight")


def check_config(text: str) -> float:
    """Return the scale of the factors' products.

    Raises BadRequest where the text is not the adapter_config.json of a LoRA.
    """
    try:
        config = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise BadRequest(f"'config' is not JSON ({exc}); send the text of adapter_config.json", param="config") from exc
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise BadRequest("'config' must be the adapter_config.json of a LoRA, with its rank 'r'", param="config")
    alpha, rank = config.get("lora_alpha", DEFAULT_ALPHA), config["r"]
    if rank < 1 or isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise BadRequest("'config' must have a rank 'r' of at least 1 and a number 'lora_alpha'", param="config")
    try:
        scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except OverflowError:  # an integer beyond float64
        scale = math.inf
    if not abs(scale) <= MAX_GAIN:
        raise BadRequest(
            f"'lora_alpha' must be of the size that training uses, such as 16: the adapter's scale is {scale:.3g}",
            param="config",
        )
    return scale


def head_bytes(beginning: bytes) -> int:
    """Return the length of the header in bytes, from the first bytes of the file. Raises BadRequest."""
    if len(beginning) < _LENGTH.size:
        raise BadRequest("the upload is not a valid safetensors file; send adapter_model.safetensors")
    (length,) = _LENGTH.unpack_from(beginning)
    if length > MAX_HEAD_BYTES:
        raise BadRequest("the upload is not a valid safetensors file; send adapter_model.safetensors")
    return _LENGTH.size + int(length)


def check_head(head: bytes, num_bytes: int) -> dict[str, Any]:
    """Return the header's entries, one per tensor.

    Raises BadRequest where the header does not describe `num_bytes` bytes of an adapter's tensors.
    """
    try:
        entries: Any = msgspec.json.decode(head[_LENGTH.size :])
        tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        ends = {name: _end_of(entry) for name, entry in tensors.items()}
        last = max(ends.values(), default=0)
        is_whole = len(head) + last == num_bytes
    except (RecursionError, AttributeError, LookupError, TypeError, ValueError) as exc:  # msgspec's are ValueErrors
        raise BadRequest("the upload is not a valid safetensors file; send adapter_model.safetensors") from exc
    if not is_whole:
        raise BadRequest(
            f"the upload has {num_bytes:,} bytes, but its header describes another size; send all parts again"
        )
    odd = sorted(str(name) for name in ends if not _TENSOR.fullmatch(str(name)))
    if odd or not ends:
        named = f"such as {odd[0][:100]!r}" if odd else "or rather none"
        raise BadRequest(f"the upload has tensors that are not LoRA factors, {named}; send adapter_model.safetensors")
    return tensors


def _end_of(entry: Any) -> int:
    """Return the end offset of a tensor's data. Raises TypeError, ValueError or LookupError for a malformed entry."""
    (begin, end), shape = entry["data_offsets"], entry["shape"]
    is_tensor = isinstance(entry["dtype"], str) and shape and all(isinstance(one, int) for one in shape)
    if not (is_tensor and isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise TypeError("no entry of a tensor")
    return end
