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
    """Format of the weight matrices."""

    AUTO = "auto"  # the format of the checkpoint
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


class RebalanceMode(StrEnum):
    """Mode in which experts are moved to other ranks."""

    ASYNC = "async"  # beside the steps
    BLOCKING = "blocking"  # between two steps


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
    DUMMY = "dummy"  # random weights; only config.json and the tokenizer are needed


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


class FleetFairness(StrEnum):
    """Exchange of tenants' service between the replicas of a model."""

    AUTO = "auto"  # with a policy that has counters of tenants
    ON = "on"
    OFF = "off"


class Overlap(StrEnum):
    """Overlap of planning and launching a step with the step before it."""

    AUTO = "auto"  # on a GPU
    ON = "on"
    OFF = "off"


class ExpertAll2All(StrEnum):
    """All-to-all between ranks with different tokens that share experts."""

    AUTO = "auto"  # torch on a CPU, torch-padded on a GPU
    TORCH = "torch"  # exact row counts, for which the host waits in each layer
    TORCH_PADDED = "torch-padded"  # fixed capacities from the last steps: the host waits once a step
    DEEPEP = "deepep"  # DeepEP's kernels


class TwoBatchOverlap(StrEnum):
    """Overlap of the all-to-all of one half of a step with the computation of the other half."""

    AUTO = "auto"  # on a GPU, for steps with enough tokens
    ON = "on"  # for every step with two tokens
    OFF = "off"


class PoolingChoice(StrEnum):
    """Pooling of the hidden states of an input into its embedding."""

    AUTO = "auto"  # as the checkpoint names it
    MEAN = "mean"
    CLS = "cls"  # the first token
    LAST = "last"  # the last token
    MAX = "max"


class NormalizeEmbeddings(StrEnum):
    """Division of embeddings by their length."""

    AUTO = "auto"  # as the checkpoint's modules have it
    ON = "on"
    OFF = "off"


class Speculate(StrEnum):
    """Source of the tokens that speculative decoding verifies; see `moiety_engine.scheduling.speculative_decoding`."""

    OFF = "off"
    NGRAM = "ngram"  # tokens that followed an earlier occurrence of the newest tokens
    DRAFT = "draft"  # a small draft model
    MTP = "mtp"  # the checkpoint's layer for multi-token prediction


class KvTransport(StrEnum):
    """Transport of KV to another engine."""

    AUTO = "auto"  # shared memory on the same host, otherwise TCP
    TCP = "tcp"
    MEMORY = "memory"
    NIXL = "nixl"  # NVIDIA's library, which the receiver reads with; see `moiety_engine.kv_transfer.nixl_memory`


class Offload(StrEnum):
    """Part of a model that is offloaded from its device."""

    NONE = "none"
    EXPERTS = "experts"  # stored in host memory or a file, cached on the device; see `moiety_engine.offload`


class ExpertEviction(StrEnum):
    """Eviction policy of the expert cache, within a layer."""

    FREQUENCY = "frequency"  # evict the least frequently used expert, with older uses decayed
    LRU = "lru"  # evict the least recently used expert
    ALL = "all"  # evict all experts after each pass
