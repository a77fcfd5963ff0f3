"""Options of a model: its weights, its layout over ranks and its steps. Every command that runs an engine has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moiety_options import panels
from moiety_options.declaration import option
from moiety_wire.engine_choices import (
    Batching,
    DeviceChoice,
    Dtype,
    ExpertAll2All,
    ExpertEviction,
    KvDtype,
    LoadFormat,
    MoeKernel,
    NormalizeEmbeddings,
    Offload,
    Overlap,
    PoolingChoice,
    Quantization,
    RebalanceMode,
    Speculate,
    TwoBatchOverlap,
)

DEMO_NAME = "moiety-demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # OWNER/NAME
ENV = "MOIETY_ENGINE_"  # prefix of the environment variables of an engine's options

_model = partial(option, env=ENV, panel=panels.MODEL)
_batching = partial(option, env=ENV, panel=panels.BATCHING)
_kv_cache = partial(option, env=ENV, panel=panels.KV_CACHE)
_speculation = partial(option, env=ENV, panel=panels.SPECULATION)
_offloading = partial(option, env=ENV, panel=panels.OFFLOADING)
_distributed = partial(option, env=ENV, panel=panels.DISTRIBUTED)


@dataclass(slots=True, kw_only=True)
class ModelOptions:
    """Options of a model's weights, its layout over ranks, and its steps."""

    model: str = _model(
        "", "Checkpoint to serve: a folder, a GGUF file or a Hugging Face hub id. If not given, the bundled demo model."
    )
    device: DeviceChoice = _model(
        DeviceChoice.AUTO, "Device that runs the model. auto selects cuda if a GPU is available, otherwise cpu."
    )
    dtype: Dtype = _model(
        Dtype.AUTO, "Data type of weights and activations. auto: float32 for a float32 checkpoint, otherwise bfloat16."
    )
    quantization: Quantization = _model(
        Quantization.AUTO, "Format of the weight matrices in memory. auto uses the format of the checkpoint."
    )
    load_format: LoadFormat = _model(
        LoadFormat.AUTO,
        "Source of the weights. auto reads the checkpoint; dummy uses random weights and needs only config.json and "
        "the tokenizer.",
    )
    moe_kernel: MoeKernel = _model(
        MoeKernel.AUTO, "Implementation of the expert layers. auto selects the fastest one that the device supports."
    )
    batch_invariant: bool = _model(
        False,
        "Return bitwise identical outputs for a request whatever else is in its batch. This is slower on a GPU.",
    )
    threads: int | None = _model(
        None, "Number of CPU threads that run the model. If not given, one per physical core.", min=1
    )
    batching: Batching = _batching(
        Batching.CONTINUOUS, "Batching strategy. The strategies other than continuous are for comparison."
    )
    max_batch_tokens: int | None = _batching(
        None, "Largest number of tokens in one step. If not given, 8192 on a GPU and 512 on a CPU.", min=1
    )
    max_running: int | None = _batching(
        None, "Largest number of sequences in the batch. If not given, 256 on a GPU and 64 on a CPU.", min=1
    )
    static_batch_size: int = _batching(
        8, "Number of sequences in a batch with --batching static, dynamic and padded.", min=1
    )
    expert_batching: bool = _batching(
        False,
        "Decode requests together that are predicted to use the same experts, when a step takes only a part of the "
        "requests and their deadlines leave the order open.",
    )
    expert_profiles: bool = _batching(
        False,
        "Report a profile of the experts that requests and recent steps use, a few hundred bytes, so that gateways "
        "with expert_routing_tokens can send a request to a replica whose steps use the same experts.",
    )
    overlap: Overlap = _batching(
        Overlap.AUTO, "Schedule and launch a step while the previous one runs. auto enables this on a GPU."
    )
    cuda_graphs: bool = _batching(
        True, "Capture decode steps as CUDA graphs at the start and replay them. Has no effect on a CPU."
    )
    kv_dtype: KvDtype = _kv_cache(
        KvDtype.AUTO,
        "Data type of the KV cache. fp8 and int8 on a GPU and bf16 on a CPU hold twice as many tokens in the same "
        "memory.",
    )
    speculate: Speculate = _speculation(
        Speculate.OFF,
        "Source of the proposed tokens in speculative decoding. ngram: earlier text of the sequence; draft: the model "
        "of --draft-model; mtp: the multi-token prediction layer of the checkpoint.",
    )
    speculate_tokens: int = _speculation(
        7, "Largest number of proposed tokens that one step verifies for a sequence.", min=1
    )
    draft_model: str = _speculation(
        "",
        "Draft model for --speculate draft: a folder or hub id of a small checkpoint with the same vocabulary.",
    )
    offload: Offload = _offloading(
        Offload.NONE,
        "Part of the model to offload. experts stores expert weights in host memory (on a CPU in a file) and caches "
        "frequently used ones on the device.",
    )
    expert_memory_bytes: int | None = _offloading(
        None,
        "Device memory of each rank for its cache of offloaded experts, such as 16GiB. If not given, half of the "
        "memory that the rest of the model leaves free, on a CPU divided among the ranks of the host.",
        is_size=True,
    )
    offload_folder: str = _offloading(
        "",
        "Folder for the file of offloaded experts, one for each rank, required on a CPU and not used on a GPU. A later "
        "start uses the same files again.",
    )
    expert_eviction: ExpertEviction = _offloading(
        ExpertEviction.FREQUENCY,
        "Eviction policy of the expert cache. all keeps no expert for the next pass and is for comparison.",
    )
    expert_prefetch: bool = _offloading(
        True, "Prefetch the offloaded experts that the router of the next layer is predicted to select."
    )
    tp: int = _distributed(
        1,
        "Tensor parallel size: number of ranks that share the heads and columns of each layer. The number of ranks is "
        "pp × dp-attention × prefill-context-parallel × tp.",
        min=1,
    )
    decode_context_parallel: int = _distributed(
        1,
        "Decode context parallel size: number of ranks of a tensor parallel group that divide the KV cache of each "
        "sequence by position. It must divide tp, and only ranks that would otherwise hold copies of the same keys "
        "and values can divide them.",
        min=1,
    )
    prefill_context_parallel: int = _distributed(
        1,
        "Prefill context parallel size: number of tensor parallel groups that each have a copy of the KV cache and "
        "divide the tokens of each step, such as those of a long prompt, among them.",
        min=1,
    )
    dp_attention: int = _distributed(
        1, "Number of tensor parallel groups that each run attention for their own sequences and share the experts.",
        min=1,
    )  # fmt: skip
    ep: int = _distributed(
        1,
        "Expert parallel size: number of parts that the experts are divided into. It must divide the number of ranks "
        "with experts, dp-attention × tp or ffn-ranks.",
        min=1,
    )
    pp: int = _distributed(1, "Pipeline parallel size: number of stages that the layers are divided into.", min=1)
    pp_microbatches: int | None = _distributed(
        None,
        "Number of steps that are in the stages of --pp at once, each with a part of the running requests. With 1, a "
        "stage waits while the others compute. Default: one for each stage.",
        min=1,
    )
    ffn_ranks: int = _distributed(
        0,
        "Number of additional ranks that run only the experts (attention–FFN disaggregation). The other ranks then "
        "run no experts.",
        min=0,
    )
    expert_all2all: ExpertAll2All = _distributed(
        ExpertAll2All.AUTO,
        "With --dp-attention, how ranks exchange tokens for their experts. torch exchanges exact row counts; "
        "torch-padded pads to the row counts of recent steps, so that the host waits once a step; deepep uses DeepEP's "
        "GPU kernels, which must be installed. auto selects torch on a CPU and torch-padded on a GPU.",
    )
    two_batch_overlap: TwoBatchOverlap = _distributed(
        TwoBatchOverlap.AUTO,
        "With --dp-attention, compute one half of a step's tokens while the other half is on its way to experts. auto "
        "enables this on a GPU for steps of at least 32 tokens in a group, or 512 if they have prompt tokens.",
    )
    micro_batches: int = _distributed(
        2,
        "With --ffn-ranks, largest number of micro-batches of a step, which alternate between attention and experts.",
        min=1,
    )
    micro_batch_tokens: int = _distributed(
        32,
        "Smallest number of tokens of a micro-batch, counted in the attention group with the most tokens. Smaller "
        "steps are not split.",
        min=1,
    )
    redundant_experts: int = _distributed(
        0,
        "Number of slots in each layer for additional replicas of frequently used experts, over all ranks. ep must "
        "divide it.",
        min=0,
    )
    rebalance_every_s: float | None = _distributed(
        None,
        "Interval at which experts may move between ranks to balance their load, in seconds; 0 disables it. If not "
        "given, 60 with --redundant-experts, otherwise 0.",
        min=0,
    )
    rebalance_mode: RebalanceMode = _distributed(
        RebalanceMode.ASYNC,
        "Whether experts move to other ranks in the background while steps run (async), or between two steps "
        "(blocking).",
    )

    expert_rank_weights: str = _distributed(
        "",
        "Weights of a token of service rank 0, 1, 2 … in the load that experts are placed by, such as 8,2,1, so that "
        "replicas go first to the experts that better ranks use. Further ranks have the last weight. If not given, all "
        "tokens count the same.",
    )


@dataclass(slots=True, kw_only=True)
class ServedModelOptions(ModelOptions):
    """Options of a model that answers requests: also its name for clients, its formats and its context length."""

    name: str = _model(
        "", "Name of the model for clients. If not given, --model, or the folder's name if that is a folder."
    )
    tool_format: str = _model(
        "auto",
        "Format in which the model calls tools, by name. auto finds it in the chat template. An unknown name is "
        "rejected with the list of names.",
    )
    reasoning_format: str = _model(
        "auto",
        "Format in which the model marks its reasoning, by name. auto finds it in the chat template. An unknown name "
        "is rejected with the list of names.",
    )
    pooling: PoolingChoice = _model(
        PoolingChoice.AUTO,
        "Pooling of embeddings. auto uses that of the checkpoint's sentence-transformers files, or without them the "
        "mean for encoder models and the last token for others, which have no other pooling.",
    )
    normalize_embeddings: NormalizeEmbeddings = _model(
        NormalizeEmbeddings.AUTO,
        "Divide embeddings by their length. auto: yes, unless the checkpoint's modules.json has no Normalize module.",
    )
    max_context_tokens: int | None = _batching(
        None,
        "Largest number of prompt and output tokens of a sequence. If not given, the context length of the model.",
        min=1,
    )


def model_name(model: str) -> str:
    """Return the name of a model for clients if `--name` is not given: its folder's name, or its id at the hub."""
    if not model:
        return DEMO_NAME
    if _HUB_ID.fullmatch(model) and not Path(model).is_dir():
        return model
    return (Path(model).resolve() if Path(model).is_dir() else Path(model)).name
