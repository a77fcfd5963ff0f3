"""Reader of checkpoints of NVIDIA ModelOpt: float8, MXFP8 and NVFP4.

Their configuration is in config.json, or, of older versions, in hf_quant_config.json.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from moiety_engine.model.checkpoint_formats.float8 import float8_format, float8_sources
from moiety_engine.model.checkpoint_formats.four_bit_floats import nvfp4_source
from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization
from moiety_engine.model.quantization_formats import method_name, refused
from moiety_kernels.quantization import NVFP4

if TYPE_CHECKING:
    from moiety_engine.model.checkpoint_formats.tensor_source import TensorSource

_SCALE, _WHOLE = ".weight_scale", ".weight_scale_2"
_MX_GROUP = 32


def modelopt(settings: dict[str, Any]) -> StoredQuantization:
    """Return the quantization of a ModelOpt checkpoint. Raises UnsupportedModelError."""
    inner = settings.get("quantization") or settings
    algorithm = str(inner.get("quant_algo")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        form = float8_format()
    elif algorithm == "MXFP8":
        form = float8_format(group=_MX_GROUP)
    elif algorithm in ("FP8_PB_WO", "FP8_PB"):
        form = float8_format((128, 128))
    elif algorithm == "NVFP4":
        return StoredQuantization("ModelOpt NVFP4", NVFP4, _nvfp4_sources)
    else:
        raise refused(method_name(settings))
    return StoredQuantization(f"ModelOpt {algorithm}", form, partial(float8_sources, form=form))


def _nvfp4_sources(present: set[str]) -> dict[str, TensorSource]:
    modules = (name.removesuffix(_WHOLE) for name in present if name.endswith(_WHOLE))
    return {
        f"{module}.weight": nvfp4_source(f"{module}.weight", module + _SCALE, module + _WHOLE, divides=False)
        for module in modules
    }
