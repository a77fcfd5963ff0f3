"""Values of the options that `moiety engine`, `moiety serve` and `moiety bench engine` share."""

from __future__ import annotations

from enum import StrEnum


class DeviceChoice(StrEnum):
    """Device that the model runs on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Type of the weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    """Format of the weights of products."""

    AUTO = "auto"  # as they are stored
    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"


class KvDtype(StrEnum):
    """Type of the KV cache."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


class Batching(StrEnum):
    """Batching strategy; see `moiety_engine.scheduling.admission.batching_strategies`."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    PADDED = "padded"
    CONTINUOUS = "continuous"


class LoadFormat(StrEnum):
    """Source of the weights."""

    AUTO = "auto"  # the checkpoint's files
    DUMMY = "dummy"  # drawn at random: only config.json and the tokenizer are needed


class MoeKernel(StrEnum):
    """Implementation of the experts of a mixture layer; see `moiety_kernels.moe`."""

    AUTO = "auto"
    TRITON = "triton"
    GROUPED = "grouped"
    REFERENCE = "reference"
