"""Values of the engine's options, which its commands, its configuration and the gateway's commands share."""

from __future__ import annotations

from enum import StrEnum

MAX_TRACED_PER_S = 1000  # steps a second that are traced in detail, at most


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


class PolicyName(StrEnum):
    """Scheduling policy under continuous batching; see `moiety_engine.scheduling.policies`."""

    MOIETY = "moiety"
    FCFS = "fcfs"
    STRICT_PRIORITY = "strict-priority"
    EDF = "edf"
    VTC = "vtc"
    DLPM = "dlpm"
    QOSERVE = "qoserve"


class Overlap(StrEnum):
    """Overlap of planning and launching a step with the step before it."""

    AUTO = "auto"  # on a GPU
    ON = "on"
    OFF = "off"


class Speculate(StrEnum):
    """Source of the tokens that speculative decoding verifies; see `moiety_engine.scheduling.speculative_decoding`."""

    OFF = "off"
    NGRAM = "ngram"  # what followed the newest words when the text said them before
    DRAFT = "draft"  # a second, small model
    MTP = "mtp"  # a layer of the checkpoint that predicts further tokens


class KvTransport(StrEnum):
    """Transport of KV to another engine."""

    AUTO = "auto"  # by shared memory on one host, else by TCP
    TCP = "tcp"
    MEMORY = "memory"


class Offload(StrEnum):
    """Part of a model that is offloaded from its device."""

    NONE = "none"
    EXPERTS = "experts"  # they are kept elsewhere, and hot ones cached on the device; see `moiety_engine.offload`


class ExpertEviction(StrEnum):
    """Eviction policy of the expert cache, within a layer."""

    FREQUENCY = "frequency"  # the one that was asked for least often, of late more than long ago
    LRU = "lru"  # the one that was asked for longest ago
    ALL = "all"  # none are kept for the next pass
