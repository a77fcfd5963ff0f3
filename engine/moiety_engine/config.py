"""The engine's configuration: read and checked in an entry point, passed down, never changed."""

from __future__ import annotations

import msgspec

from moiety_engine.errors import InvalidConfig
from moiety_wire.engine_choices import (
    MAX_TRACED_PER_S,
    Batching,
    DeviceChoice,
    Dtype,
    ExpertAll2All,
    ExpertEviction,
    FleetFairness,
    KvDtype,
    KvTransport,
    LoadFormat,
    MoeKernel,
    NormalizeEmbeddings,
    Offload,
    Overlap,
    PolicyName,
    PoolingChoice,
    Quantization,
    RebalanceMode,
    Speculate,
    TwoBatchOverlap,
)
from moiety_wire.roles import EngineRole

__all__ = [  # the configuration, and those values of its fields that the code that makes one needs
    "EngineConfig",
    "ExpertEviction",
    "FleetFairness",
    "GrammarLimits",
    "ImageOptions",
    "KvTransport",
    "NormalizeEmbeddings",
    "Offload",
    "OffloadConfig",
    "Overlap",
    "PolicyName",
    "PoolingChoice",
    "Speculate",
    "TransferConfig",
]

MAX_RANK_WEIGHT = 255
REBALANCE_EVERY_S = 60.0  # where experts are redundant, which is of no use if they stay where they are
EXCLUDE_AFTER_FAILURES = 3  # where --rank-failure-log is given
LOSSES_WITHIN_S = 600.0


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of KV transfer between engines."""

    role: EngineRole = EngineRole.BOTH
    listen: str = ""  # ZeroMQ address for KV from other engines; "" takes none
    key_file: str = ""  # with the secret CURVE key, the same for all engines; "": the link is open
    transport: KvTransport = KvTransport.AUTO
    buffer_bytes: int | None = None  # host memory for KV in transfer; None: a tenth of the available memory


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that need not fit on the device."""

    what: Offload = Offload.NONE
    memory_bytes: int | None = None  # of the device, for experts; None: half of what the rest leaves free
    folder: str = ""  # where a processor's are kept, in a file
    eviction: ExpertEviction = ExpertEviction.FREQUENCY
    prefetch: bool = True  # experts that the next layer's router would choose are fetched ahead


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the processes that compile and step grammars, which the operating system enforces."""

    compile_cpu_s: float = 1.0  # processor time of one compilation with its first mask
    compile_wall_s: float = 5.0  # the same, by the clock
    compile_memory_bytes: int = 512 << 20  # address space beyond what the process had at its start
    worker_memory_bytes: int = 4 << 30  # the same, of a process that steps the grammars of all requests
    max_waiting_per_tenant: int = 64  # compilations of one tenant that wait; further ones are refused

    def __post_init__(self) -> None:
        if not (0.05 <= self.compile_cpu_s <= 60 and 0.05 <= self.compile_wall_s <= 60):
            raise InvalidConfig(
                "grammar_compile_cpu_s and grammar_compile_wall_s must be between 0.05 and 60 seconds, "
                f"not {self.compile_cpu_s} and {self.compile_wall_s}"
            )
        if self.compile_memory_bytes < 16 << 20 or self.worker_memory_bytes < self.compile_memory_bytes:
            raise InvalidConfig(
                "grammar_compile_memory_bytes must be at least 16 MiB, and grammar_worker_memory_bytes "
                f"at least as much, not {self.compile_memory_bytes} and {self.worker_memory_bytes}"
            )
        if self.max_waiting_per_tenant < 1:
            raise InvalidConfig(f"grammar_queue must be at least 1, not {self.max_waiting_per_tenant}")


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of images, for models with a vision encoder."""

    cache_bytes: int = 512 << 20  # device memory for encoded images
    max_images: int = 16  # in one prompt
    max_bytes: int = 20 << 20  # of one encoded image, and
    max_source_pixels: int = 36_000_000  # of one image before it is resized
    max_pixels: int = 1 << 21  # of one image after it is resized
    decode_cpu_s: float = 5.0  # processor time of decoding one image
    decode_wall_s: float = 15.0  # the same, by the clock
    decode_memory_bytes: int = 512 << 20  # address space for it, beyond what the process had at its start
    decode_processes: int = 2  # images that are decoded at once
    decoded_cache_bytes: int = 256 << 20  # host memory for the pixels of recently decoded images
    pixel_memory_bytes: int = 4 << 30  # host memory for the pixels of all open requests
    max_decoding: int = 64  # images of one tenant that wait to be decoded; requests with further ones are refused

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in self.__struct_fields__ if not name.endswith("cache_bytes")}
        for name, value in limits.items():
            if not value > 0:
                raise InvalidConfig(f"image limit {name} must be more than 0, not {value}")
        for name in ("cache_bytes", "decoded_cache_bytes"):
            if getattr(self, name) < 0:
                raise InvalidConfig(f"image limit {name} must be 0 (keep nothing) or more, not {getattr(self, name)}")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. `None` and "auto" are resolved by the core from the model and the machine."""

    model: str  # checkpoint folder, already resolved
    name: str  # what clients call the model
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"  # how the weights of products are kept; auto: as the checkpoint has them
    kv_dtype: str = "auto"  # of cached keys and values; "auto": that of activations
    moe_kernel: MoeKernel = MoeKernel.AUTO
    batch_invariant: bool = False  # a request gets the same bits alone and in any batch
    batching: Batching = Batching.CONTINUOUS
    expert_batching: bool = False  # of decodes whose order is open, those that use the same experts share a step
    expert_profiles: bool = False  # gateways get profiles of the experts that requests and steps use
    policy: PolicyName = PolicyName.MOIETY  # for continuous batching; the other strategies are first come, first served
    fleet_fairness: FleetFairness = FleetFairness.AUTO  # exchange of tenants' service with the model's other replicas
    max_batch_tokens: int | None = None  # token budget of one step
    max_running: int | None = None  # sequences in the batch
    kv_memory_bytes: int | None = None
    host_kv_memory_bytes: int | None = None  # host memory that KV is swapped to; 0 for none
    sleep_folder: str = ""  # for the weights of a sleeping engine; "": host memory
    disk_cache: str = ""  # folder of the prefix cache's tier on disk; "": none
    disk_cache_bytes: int = 16 << 30
    disk_cache_ttl_s: float = 86_400.0  # what has not been used for so long is deleted
    block_size: int | None = None  # tokens a KV block
    max_context_tokens: int | None = None
    num_threads: int | None = None
    prefix_caching: bool = True
    load_format: LoadFormat = LoadFormat.AUTO
    pooling: PoolingChoice = PoolingChoice.AUTO  # of embeddings
    normalize_embeddings: NormalizeEmbeddings = NormalizeEmbeddings.AUTO
    overlap: Overlap = Overlap.AUTO
    speculate: Speculate = Speculate.OFF
    speculate_tokens: int = 7  # the longest draft; with the token before it 8 rows, as processors like them
    draft_model: str = ""  # checkpoint folder of the second model, already resolved
    cuda_graphs: bool = True  # replay decode steps on a GPU
    traced_steps_per_s: float = 20.0  # looked at closely, for the traces of requests; 0 for none
    batch_timeout_ms: float = 50.0  # `dynamic`: how long the first request waits for company
    static_batch_size: int = 8  # `static`, `dynamic` and `padded`: the size of a batch
    tp: int = 1  # ranks that share the heads and columns of each layer; see `moiety_engine.distribution.layout`
    decode_context_parallel: int = 1  # of these ranks, those that divide the positions of a sequence's cache
    prefill_context_parallel: int = 1  # groups of such ranks with one cache, which divide the tokens of a step
    dp_attention: int = 1  # groups of such ranks, each with sequences of its own
    ep: int = 1  # parts that the experts are divided into
    pp: int = 1  # stages of layers, one after the other
    pp_microbatches: int | None = None  # steps in the stages at once; 1: one after the other; None: one for each stage
    ffn_ranks: int = 0  # further ranks, which have the experts and nothing else; 0: all ranks have some
    expert_all2all: ExpertAll2All = ExpertAll2All.AUTO  # between ranks with different tokens that share experts
    two_batch_overlap: TwoBatchOverlap = TwoBatchOverlap.AUTO  # between ranks with different tokens
    micro_batches: int = 2  # with expert ranks: a step is cut into so many at most,
    micro_batch_tokens: int = 32  # and none has fewer tokens of the group that has the most
    redundant_experts: int = 0  # slots of a layer beyond its experts, for second replicas of hot ones
    rebalance_every_s: float | None = None  # 0: experts stay where they are; None: so, unless some are redundant
    rebalance_mode: RebalanceMode = RebalanceMode.ASYNC
    expert_rank_weights: str = ""  # weights of service ranks in the load that experts are placed by; "": all alike
    join_timeout_s: float = 60.0  # how long ranks wait for each other at the start
    allow_unauthenticated_ranks: bool = False  # ranks of several hosts talk over links without keys
    exclude_rank_after_s: float | None = None  # and for those that can be done without; None: for all of them alike
    rank_failure_log: str = ""  # rank 0's file of which ranks were lost; "": none
    exclude_rank_after_failures: int | None = None  # a rank with so many recent failures is excluded; None: three
    rank_failures_within_s: float | None = None  # age limit of recent failures; None: ten minutes
    transfer: TransferConfig = TransferConfig()
    offload: OffloadConfig = OffloadConfig()
    grammar: GrammarLimits = GrammarLimits()
    images: ImageOptions = ImageOptions()
    adapters: dict[str, str] = {}  # of the operator: name → folder
    adapter_memory_bytes: int | None = None  # of the device; 0: no adapters
    max_adapters: int = 64  # in memory at once
    max_adapter_rank: int = 32

    def __post_init__(self) -> None:
        choices = {"device": DeviceChoice, "dtype": Dtype, "quantization": Quantization, "kv_dtype": KvDtype}
        for name, known in choices.items():
            if (value := getattr(self, name)) not in list(known):
                raise InvalidConfig(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.batch_invariant and self.batching is Batching.PADDED:
            raise InvalidConfig("batch_invariant is not available with padded batching: choose another --batching")
        positive = {
            "max_batch_tokens": self.max_batch_tokens,
            "max_running": self.max_running,
            "kv_memory_bytes": self.kv_memory_bytes,
            "block_size": self.block_size,
            "max_context_tokens": self.max_context_tokens,
            "num_threads": self.num_threads,
            "static_batch_size": self.static_batch_size,
            "speculate_tokens": self.speculate_tokens,
            "pp_microbatches": self.pp_microbatches,
            "micro_batches": self.micro_batches,
            "micro_batch_tokens": self.micro_batch_tokens,
            "max_adapters": self.max_adapters,
            "max_adapter_rank": self.max_adapter_rank,
        }
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise InvalidConfig(f"{name} must be at least 1, not {value}; leave it out for the default")
        if self.host_kv_memory_bytes is not None and self.host_kv_memory_bytes < 0:
            raise InvalidConfig(
                f"host_kv_memory_bytes must be 0 (no host tier) or more, not {self.host_kv_memory_bytes}"
            )
        self._check_speculation()
        self._check_adapters()
        self._check_disk_cache()
        if not 0 <= self.traced_steps_per_s <= MAX_TRACED_PER_S:
            raise InvalidConfig(
                f"traced_steps_per_s must be between 0 and {MAX_TRACED_PER_S}, not {self.traced_steps_per_s}"
            )
        self._check_transfer()
        self._check_offload()
        self._check_rank_exclusion()
        self._check_pipeline()
        if self.redundant_experts < 0 or not (self.rebalance_every_s or 0) >= 0:
            raise InvalidConfig(
                "redundant_experts must be 0 (none) or more, and rebalance_every_s 0 (never) or more, "
                f"not {self.redundant_experts} and {self.rebalance_every_s}"
            )
        if self.expert_batching and (self.policy is not PolicyName.MOIETY or self.batching is not Batching.CONTINUOUS):
            raise InvalidConfig(
                "--expert-batching needs --policy moiety and --batching continuous, since these choose the decodes of "
                "a step: leave it out, or use them"
            )
        _ = self.rank_weights  # raises if they are wrong
        if self.batch_timeout_ms < 0:
            raise InvalidConfig(f"batch_timeout_ms must be 0 or more, not {self.batch_timeout_ms}")

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp_attention * self.prefill_context_parallel * self.tp + self.ffn_ranks

    @property
    def steps_in_flight(self) -> int:
        """Number of steps in the stages of a pipeline at once: by default one for each stage.

        1 without stages, with expert ranks, which compute one step after the other, and with padded batching, whose
        rows run together.
        """
        if self.pp == 1 or self.ffn_ranks or self.batching is Batching.PADDED:
            return 1
        return self.pp if self.pp_microbatches is None else self.pp_microbatches

    def _check_pipeline(self) -> None:
        if self.steps_in_flight > 1 and self.two_batch_overlap is TwoBatchOverlap.ON:
            raise InvalidConfig(
                "--two-batch-overlap on is not available with several steps in the stages of --pp, which run each step "
                "in one piece: leave it out, or set --pp-microbatches 1"
            )
        if self.steps_in_flight > 1 and self.expert_batching:
            raise InvalidConfig(
                "--expert-batching is not available with several steps in the stages of --pp, which divide the decodes "
                "that it chooses once more: leave it out, or set --pp-microbatches 1"
            )
        if self.pp_microbatches in (None, 1):
            return
        if self.pp == 1:
            raise InvalidConfig(
                f"--pp-microbatches {self.pp_microbatches} needs stages: set --pp, or leave out --pp-microbatches"
            )
        if self.ffn_ranks:
            raise InvalidConfig(
                f"--pp-microbatches {self.pp_microbatches} is not available with --ffn-ranks, which compute one step "
                "after the other: leave it out"
            )
        if self.batching is Batching.PADDED:
            raise InvalidConfig(
                f"--pp-microbatches {self.pp_microbatches} is not available with padded batching, whose rows run "
                "together: leave it out, or choose another --batching"
            )

    def _check_speculation(self) -> None:
        if self.speculate is not Speculate.OFF and self.batching is Batching.PADDED:
            raise InvalidConfig(
                "speculative decoding is not available with padded batching: choose another --batching, "
                "or use --speculate off"
            )
        if self.draft_model and self.speculate is not Speculate.DRAFT:
            raise InvalidConfig("--draft-model needs --speculate draft: set both, or leave out --draft-model")
        if self.speculate is Speculate.DRAFT and not self.draft_model:
            raise InvalidConfig("--speculate draft needs --draft-model, a small checkpoint with the same vocabulary")
        if self.speculate is Speculate.MTP and self.pp > 1:
            raise InvalidConfig(
                "--speculate mtp is not available with --pp, since the MTP layer on the first stage reads hidden "
                "states of the last stage: leave out --pp, or use --speculate draft or --speculate ngram"
            )

    @property
    def rebalanced_every_s(self) -> float:
        """Seconds from one look at where experts are to the next; 0: they stay there."""
        default = REBALANCE_EVERY_S if self.redundant_experts else 0.0
        return default if self.rebalance_every_s is None else self.rebalance_every_s

    @property
    def rank_weights(self) -> tuple[int, ...] | None:
        """Weights of service ranks 0, 1, 2 … in the load that experts are placed by; None: all alike.

        Raises InvalidConfig.
        """
        if not self.expert_rank_weights:
            return None
        words = self.expert_rank_weights.split(",")
        weights = tuple(int(word) if word.strip().isascii() and word.strip().isdigit() else 0 for word in words)
        if not all(1 <= weight <= MAX_RANK_WEIGHT for weight in weights):
            raise InvalidConfig(
                f"--expert-rank-weights must be whole numbers from 1 to {MAX_RANK_WEIGHT}, separated by commas, not "
                f"{self.expert_rank_weights!r}"
            )
        if not self.rebalanced_every_s:
            raise InvalidConfig(
                "--expert-rank-weights needs experts that move: set --rebalance-every-s or --redundant-experts, or "
                "leave it out"
            )
        return weights

    def _check_transfer(self) -> None:
        transfer = self.transfer
        if transfer.role is EngineRole.BOTH and not transfer.listen:
            return
        if self.batching is not Batching.CONTINUOUS:
            raise InvalidConfig(f"KV transfer needs --batching continuous, not {self.batching}")
        if transfer.buffer_bytes is not None and transfer.buffer_bytes < 1:
            raise InvalidConfig(
                f"kv_buffer_bytes must be at least 1, not {transfer.buffer_bytes}; leave it out for the default"
            )

    @property
    def excluded_after_losses(self) -> int:
        return EXCLUDE_AFTER_FAILURES if self.exclude_rank_after_failures is None else self.exclude_rank_after_failures

    @property
    def losses_within_s(self) -> float:
        return LOSSES_WITHIN_S if self.rank_failures_within_s is None else self.rank_failures_within_s

    def _check_rank_exclusion(self) -> None:
        if not self.rank_failure_log and (
            self.exclude_rank_after_failures is not None or self.rank_failures_within_s is not None
        ):
            raise InvalidConfig(
                "--exclude-rank-after-failures and --rank-failures-within-s need --rank-failure-log: set "
                "it, or leave them out"
            )
        if self.exclude_rank_after_s is None:
            if self.rank_failure_log:
                raise InvalidConfig(
                    "--rank-failure-log needs --exclude-rank-after-s, which lets a group start without "
                    "failed ranks: set both, or leave out --rank-failure-log"
                )
            return
        if self.num_ranks == 1:
            raise InvalidConfig("--exclude-rank-after-s needs more than one rank: leave it out")
        if not 0 < self.exclude_rank_after_s <= self.join_timeout_s:
            raise InvalidConfig(
                f"--exclude-rank-after-s must be more than 0 and at most --join-timeout-s "
                f"({self.join_timeout_s:g}), not {self.exclude_rank_after_s:g}"
            )
        if self.excluded_after_losses < 1:
            raise InvalidConfig(
                f"--exclude-rank-after-failures must be at least 1, not {self.exclude_rank_after_failures}"
            )
        if not self.losses_within_s > 0:
            raise InvalidConfig(f"--rank-failures-within-s must be more than 0, not {self.rank_failures_within_s}")

    def _check_disk_cache(self) -> None:
        if not self.disk_cache:
            return
        if not self.prefix_caching:
            raise InvalidConfig("--disk-cache needs prefix caching: leave out --no-prefix-caching or --disk-cache")
        if self.disk_cache_bytes < 1 or self.disk_cache_ttl_s <= 0:
            raise InvalidConfig(
                f"disk_cache_bytes and disk_cache_ttl_s must be more than 0, not {self.disk_cache_bytes} "
                f"and {self.disk_cache_ttl_s}; leave them out for the defaults"
            )

    def _check_offload(self) -> None:
        offload = self.offload
        if offload.what is Offload.NONE:
            if offload.memory_bytes is not None or offload.folder:
                raise InvalidConfig(
                    "--expert-memory-bytes and --offload-folder need --offload experts: set it, or leave them out"
                )
            return
        if offload.memory_bytes is not None and offload.memory_bytes < 1:
            raise InvalidConfig(
                f"--expert-memory-bytes must be at least 1, not {offload.memory_bytes}; leave it out for the default"
            )
        if self.rebalanced_every_s:
            raise InvalidConfig(
                "offloaded experts do not move to other ranks: leave out --rebalance-every-s (with --redundant-experts "
                "set it to 0), or leave out --offload"
            )
        if self.adapters or self.adapter_memory_bytes:
            raise InvalidConfig(
                "adapters are not available with offloaded experts: leave out --adapter and "
                "--adapter-memory-bytes, or --offload"
            )

    def _check_adapters(self) -> None:
        if self.adapter_memory_bytes is not None and self.adapter_memory_bytes < 0:
            raise InvalidConfig(
                f"adapter_memory_bytes must be 0 (no adapters) or more, not {self.adapter_memory_bytes}"
            )
        if self.adapter_memory_bytes == 0 and self.adapters:
            raise InvalidConfig(
                "--adapter needs adapter memory, but adapter_memory_bytes is 0: raise it, or leave out --adapter"
            )
