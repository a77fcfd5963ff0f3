"""Command-line options of `moiety engine`: names, environment variables and help. The command interprets them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moiety_engine.config import MAX_TRACED_PER_S, KvTransport, Overlap, PolicyName, Speculate
from moiety_wire.engine_choices import Batching, DeviceChoice, Dtype, KvDtype, LoadFormat, MoeKernel, Quantization
from moiety_wire.roles import EngineRole

LISTENING = "Where it listens"
ADAPTERS = "Adapters"
MEMORY = "Batching and memory"
ROLES = "Prompts and answers on engines of their own"
TESTING = "Without a model"


ModelOption = Annotated[
    str, typer.Option(envvar="MOIETY_ENGINE_MODEL", help="Checkpoint folder or hub id; empty: the demo model.")
]
NameOption = Annotated[
    str, typer.Option(envvar="MOIETY_ENGINE_NAME", help="What clients call the model; from --model if not given.")
]
ListenOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_LISTEN",
        rich_help_panel=LISTENING,
        help="ZeroMQ address for gateways, tcp:// or ipc://; tcp port 0 takes a free one.",
    ),
]
AddressFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_ADDRESS_FILE",
        rich_help_panel=LISTENING,
        help="Write the bound address here when ready to serve.",
    ),
]
UsageJournalOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_USAGE_JOURNAL",
        rich_help_panel=LISTENING,
        help="Append what each request used to this file; `moiety usage reconcile` checks bills by it.",
    ),
]
UnacknowledgedUsageOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_UNACKNOWLEDGED_USAGE",
        rich_help_panel=LISTENING,
        help="Keep in this file, for the next start, what gateways have not yet stored of what requests used.",
    ),
]
MetricsListenOption = Annotated[
    str | None,
    typer.Option(
        envvar="MOIETY_ENGINE_METRICS_LISTEN",
        rich_help_panel=LISTENING,
        help="host:port of /metrics for Prometheus; port 0 takes a free one. The gateway tells most of it as well.",
    ),
]
CurveKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_CURVE_KEY_FILE",
        rich_help_panel=LISTENING,
        help="File with the secret CURVE key (Z85, 40 characters); connections are then encrypted.",
    ),
]
GatewayKeysFileOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_GATEWAY_KEYS_FILE",
        rich_help_panel=LISTENING,
        help="File with the public CURVE keys (Z85, one a line) of the gateways that may connect; others are refused.",
    ),
]
AllowUnauthenticatedTcpOption = Annotated[
    bool,
    typer.Option(
        "--allow-unauthenticated-tcp",
        envvar="MOIETY_ENGINE_ALLOW_UNAUTHENTICATED_TCP",
        rich_help_panel=LISTENING,
        help="Listen beyond loopback without keys. Whoever reaches the address then controls the engine.",
    ),
]
DeviceOption = Annotated[DeviceChoice, typer.Option(envvar="MOIETY_ENGINE_DEVICE", help="Where the model runs.")]
DtypeOption = Annotated[Dtype, typer.Option(envvar="MOIETY_ENGINE_DTYPE", help="Type of the weights.")]
QuantizationOption = Annotated[
    Quantization,
    typer.Option(
        envvar="MOIETY_ENGINE_QUANTIZATION", help="How the weights of products are kept; auto: as they are stored."
    ),
]
KvDtypeOption = Annotated[
    KvDtype,
    typer.Option(
        envvar="MOIETY_ENGINE_KV_DTYPE",
        rich_help_panel=MEMORY,
        help="Type of cached keys and values; bf16 on a CPU, fp8 or int8 on a GPU hold twice the tokens.",
    ),
]
MoeKernelOption = Annotated[
    MoeKernel,
    typer.Option(envvar="MOIETY_ENGINE_MOE_KERNEL", help="Who computes experts; auto: the fastest that can."),
]
BatchInvariantOption = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        envvar="MOIETY_ENGINE_BATCH_INVARIANT",
        help="A request gets the same bits alone and in any batch, at some cost on a GPU.",
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(envvar="MOIETY_ENGINE_THREADS", min=1, help="Processor threads of the model.")
]
LoadFormatOption = Annotated[
    LoadFormat,
    typer.Option(
        envvar="MOIETY_ENGINE_LOAD_FORMAT",
        help="Where weights come from; dummy: drawn at random, so that config.json and the tokenizer are enough.",
    ),
]
RoleOption = Annotated[
    EngineRole,
    typer.Option(
        envvar="MOIETY_ENGINE_ROLE",
        rich_help_panel=ROLES,
        help="prefill: computes prompts, and hands them over to engines of the role decode, which write the answers.",
    ),
]
KvListenOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_KV_LISTEN",
        rich_help_panel=ROLES,
        help="ZeroMQ address for KV from other engines, tcp://; with --role decode a free port beside --listen's.",
    ),
]
KvTransportOption = Annotated[
    KvTransport,
    typer.Option(
        envvar="MOIETY_ENGINE_KV_TRANSPORT",
        rich_help_panel=ROLES,
        help="How KV leaves for other engines; auto: by shared memory on one host, else by TCP.",
    ),
]
KvBufferBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_KV_BUFFER_BYTES",
        rich_help_panel=ROLES,
        help="Host memory for KV on its way, such as 4GiB; empty: a tenth of what is there.",
    ),
]
OverlapOption = Annotated[
    Overlap,
    typer.Option(
        envvar="MOIETY_ENGINE_OVERLAP",
        rich_help_panel=MEMORY,
        help="Plan and launch a step while the one before it runs; auto: on a GPU.",
    ),
]
SpeculateOption = Annotated[
    Speculate,
    typer.Option(
        envvar="MOIETY_ENGINE_SPECULATE",
        rich_help_panel=MEMORY,
        help="Guess tokens and verify them several at once, where that pays; ngram: by what the text said before; "
        "draft: by --draft-model; mtp: by a layer of the checkpoint that predicts further tokens.",
    ),
]
SpeculateTokensOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_SPECULATE_TOKENS", min=1, rich_help_panel=MEMORY, help="The most tokens guessed at once."
    ),
]
DraftModelOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_DRAFT_MODEL",
        rich_help_panel=MEMORY,
        help="Small checkpoint with the same vocabulary, a folder or hub id, that guesses for --speculate draft.",
    ),
]
CudaGraphsOption = Annotated[
    bool,
    typer.Option(
        envvar="MOIETY_ENGINE_CUDA_GRAPHS",
        rich_help_panel=MEMORY,
        help="Capture decode steps at the start and replay them, on a GPU.",
    ),
]
BatchingOption = Annotated[
    Batching,
    typer.Option(envvar="MOIETY_ENGINE_BATCHING", rich_help_panel=MEMORY, help="How requests are put into steps."),
]
MaxBatchTokensOption = Annotated[
    int | None,
    typer.Option(
        envvar="MOIETY_ENGINE_MAX_BATCH_TOKENS", min=1, rich_help_panel=MEMORY, help="Token budget of one step."
    ),
]
MaxRunningOption = Annotated[
    int | None,
    typer.Option(envvar="MOIETY_ENGINE_MAX_RUNNING", min=1, rich_help_panel=MEMORY, help="Sequences in the batch."),
]
MaxContextTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-context-tokens",
        "--max-context",
        envvar="MOIETY_ENGINE_MAX_CONTEXT_TOKENS",
        min=1,
        rich_help_panel=MEMORY,
        help="Longest prompt and answer together; at most what the model was made for.",
    ),
]
KvMemoryBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_KV_MEMORY_BYTES",
        rich_help_panel=MEMORY,
        help="Memory of the KV cache, such as 4GiB; empty: from the memory that is there.",
    ),
]
PolicyOption = Annotated[
    PolicyName,
    typer.Option(
        envvar="MOIETY_ENGINE_POLICY", help="Who goes first under continuous batching; the others are for comparison."
    ),
]
HostKvMemoryBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_HOST_KV_MEMORY_BYTES",
        rich_help_panel=MEMORY,
        help="Host memory that KV is swapped to, such as 16GiB; 0 for none; empty: some beside a GPU, none on a CPU.",
    ),
]
DiskCacheOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MOIETY_ENGINE_DISK_CACHE",
        file_okay=False,
        rich_help_panel=MEMORY,
        help="Folder in which the prefix cache keeps KV, also beyond the engine's life; one for each engine.",
    ),
]
DiskCacheBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_DISK_CACHE_BYTES", rich_help_panel=MEMORY, help="What it may take there, such as 200GiB."
    ),
]
DiskCacheTtlOption = Annotated[
    float,
    typer.Option(
        "--disk-cache-ttl",
        envvar="MOIETY_ENGINE_DISK_CACHE_TTL",
        min=1,
        rich_help_panel=MEMORY,
        help="Seconds after its last use at which KV on disk is deleted.",
    ),
]
BlockSizeOption = Annotated[
    int | None,
    typer.Option(envvar="MOIETY_ENGINE_BLOCK_SIZE", min=1, rich_help_panel=MEMORY, help="Tokens of a KV block."),
]
PrefixCachingOption = Annotated[
    bool,
    typer.Option(
        envvar="MOIETY_ENGINE_PREFIX_CACHING",
        rich_help_panel=MEMORY,
        help="Keep the KV blocks of prompts for requests that begin alike.",
    ),
]
StaticBatchSizeOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_STATIC_BATCH_SIZE",
        min=1,
        rich_help_panel=MEMORY,
        help="Size of a batch for --batching static, dynamic and padded.",
    ),
]
BatchTimeoutMsOption = Annotated[
    float,
    typer.Option(
        envvar="MOIETY_ENGINE_BATCH_TIMEOUT_MS",
        min=0,
        rich_help_panel=MEMORY,
        help="How long --batching dynamic waits for a batch to fill.",
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        envvar="MOIETY_ENGINE_ADAPTERS",
        rich_help_panel=ADAPTERS,
        help="NAME=FOLDER of a LoRA adapter in PEFT's form, read at the start; may be given several times.",
    ),
]
AdapterMemoryBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_ADAPTER_MEMORY_BYTES",
        rich_help_panel=ADAPTERS,
        help="Memory of the device for adapters, such as 2GiB; 0: none are served; empty: 1 GiB, of a GPU a 64th.",
    ),
]
AdapterDiskBytesOption = Annotated[
    str,
    typer.Option(
        envvar="MOIETY_ENGINE_ADAPTER_DISK_BYTES",
        rich_help_panel=ADAPTERS,
        help="Disk for adapters that gateways send, in the folder for temporary files.",
    ),
]
MaxAdaptersOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_MAX_ADAPTERS", min=1, rich_help_panel=ADAPTERS, help="Adapters in memory at once."
    ),
]
MaxAdapterRankOption = Annotated[
    int,
    typer.Option(
        envvar="MOIETY_ENGINE_MAX_ADAPTER_RANK", min=1, rich_help_panel=ADAPTERS, help="The highest rank served."
    ),
]
DrainTimeoutOption = Annotated[
    float,
    typer.Option(envvar="MOIETY_ENGINE_DRAIN_TIMEOUT", min=0, help="Seconds that a stop waits for open requests."),
]
CoreSilenceOption = Annotated[
    float,
    typer.Option(
        envvar="MOIETY_ENGINE_CORE_SILENCE_S",
        min=1,
        help="Seconds without a sign of life after which the core counts as hung and is killed; more than any step.",
    ),
]
TracedStepsOption = Annotated[
    float,
    typer.Option(
        envvar="MOIETY_ENGINE_TRACED_STEPS_PER_S",
        min=0,
        max=MAX_TRACED_PER_S,
        help="Steps a second that are looked at closely, for the traces of the requests in them; 0 for none.",
    ),
]
ScriptedOption = Annotated[
    bool,
    typer.Option(
        "--scripted",
        envvar="MOIETY_ENGINE_SCRIPTED",
        rich_help_panel=TESTING,
        help="Answer with the prompt's own tokens, without a model; for tests and measurements.",
    ),
]
ScriptedTokensPerStepOption = Annotated[
    int, typer.Option(min=1, rich_help_panel=TESTING, help="Tokens that each request gets in a scripted step.")
]
ScriptedStepMsOption = Annotated[
    float, typer.Option(min=0, rich_help_panel=TESTING, help="How long a scripted step takes.")
]
