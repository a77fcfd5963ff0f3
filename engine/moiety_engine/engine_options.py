"""Options of the commands that run an engine, each declared once. `moiety bench engine` shares those of the model."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import (
    EngineConfig,
    ExpertEviction,
    GrammarLimits,
    KvTransport,
    Offload,
    OffloadConfig,
    Overlap,
    PolicyName,
    Speculate,
    TransferConfig,
)
from moiety_engine.server import grammar_options, offload_options, options, rank_options
from moiety_engine.server.settings import CORE_SILENCE_S
from moiety_wire.engine_choices import Batching, DeviceChoice, Dtype, KvDtype, LoadFormat, MoeKernel, Quantization
from moiety_wire.roles import EngineRole

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_SAME = (
    "moe_kernel", "batch_invariant", "load_format", "batching", "max_batch_tokens", "max_running",
    "static_batch_size", "overlap", "speculate", "speculate_tokens", "cuda_graphs", "tp", "dp_attention", "ep",
    "pp", "ffn_ranks", "micro_batches", "micro_batch_tokens", "redundant_experts", "rebalance_every_s",
)  # fmt: skip
_SAME_OF_SERVER = (
    "max_context_tokens", "policy", "block_size", "prefix_caching", "batch_timeout_ms", "join_timeout_s",
    "allow_unauthenticated_ranks", "exclude_rank_after_s", "exclude_rank_after_failures", "rank_failures_within_s",
    "max_adapters", "max_adapter_rank", "traced_steps_per_s",
)  # fmt: skip


def parse_size(text: str) -> int:
    """Return the bytes of `1500000`, `512M`, `4GiB` (1024) or `4GB` (1000). Raises typer.BadParameter."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 4GiB, 512MB or a number of bytes")
    number, unit, binary = found.groups()
    decimal = text.strip().upper().endswith("B") and not binary
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1000 if decimal else 1024) ** power)


def _size_or_none(text: str) -> int | None:
    return parse_size(text) if text else None


@dataclass(slots=True, kw_only=True)
class ModelOptions:
    """Options of a model's weights, its layout over ranks, and its steps."""

    model: options.ModelOption = ""
    device: options.DeviceOption = DeviceChoice.AUTO
    dtype: options.DtypeOption = Dtype.AUTO
    quantization: options.QuantizationOption = Quantization.AUTO
    kv_dtype: options.KvDtypeOption = KvDtype.AUTO
    moe_kernel: options.MoeKernelOption = MoeKernel.AUTO
    batch_invariant: options.BatchInvariantOption = False
    threads: options.ThreadsOption = None
    load_format: options.LoadFormatOption = LoadFormat.AUTO
    batching: options.BatchingOption = Batching.CONTINUOUS
    max_batch_tokens: options.MaxBatchTokensOption = None
    max_running: options.MaxRunningOption = None
    static_batch_size: options.StaticBatchSizeOption = 8
    overlap: options.OverlapOption = Overlap.AUTO
    speculate: options.SpeculateOption = Speculate.OFF
    speculate_tokens: options.SpeculateTokensOption = 7
    draft_model: options.DraftModelOption = ""
    cuda_graphs: options.CudaGraphsOption = True
    offload: offload_options.OffloadOption = Offload.NONE
    expert_memory_bytes: offload_options.ExpertMemoryBytesOption = ""
    offload_folder: offload_options.OffloadFolderOption = ""
    expert_eviction: offload_options.ExpertEvictionOption = ExpertEviction.FREQUENCY
    expert_prefetch: offload_options.ExpertPrefetchOption = True
    tp: rank_options.TpOption = 1
    dp_attention: rank_options.DpAttentionOption = 1
    ep: rank_options.EpOption = 1
    pp: rank_options.PpOption = 1
    ffn_ranks: rank_options.FfnRanksOption = 0
    micro_batches: rank_options.MicroBatchesOption = 2
    micro_batch_tokens: rank_options.MicroBatchTokensOption = 32
    redundant_experts: rank_options.RedundantExpertsOption = 0
    rebalance_every_s: rank_options.RebalanceEveryOption = None

    def engine_config(self, folder: Path, name: str, **further: Any) -> EngineConfig:
        """Return the configuration of an engine for the checkpoint in `folder`. `further`: more of its fields. Raises
        CheckpointError and InvalidConfig."""
        return EngineConfig(
            model=str(folder),
            name=name,
            device=self.device.value,
            dtype=self.dtype.value,
            quantization=self.quantization.value,
            kv_dtype=self.kv_dtype.value,
            draft_model=str(resolve_checkpoint(self.draft_model)) if self.draft_model else "",
            num_threads=self.threads,
            offload=OffloadConfig(
                what=self.offload,
                memory_bytes=parse_size(self.expert_memory_bytes) if self.expert_memory_bytes else None,
                folder=self.offload_folder,
                eviction=self.expert_eviction,
                prefetch=self.expert_prefetch,
            ),
            **{name: getattr(self, name) for name in _SAME},
            **further,
        )


@dataclass(slots=True, kw_only=True)
class EngineOptions(ModelOptions):
    """Options of `moiety engine`."""

    name: options.NameOption = ""
    listen: options.ListenOption = "tcp://127.0.0.1:5757"
    address_file: options.AddressFileOption = None
    usage_journal: options.UsageJournalOption = None
    unacknowledged_usage: options.UnacknowledgedUsageOption = None
    metrics_listen: options.MetricsListenOption = None
    curve_key_file: options.CurveKeyFileOption = None
    gateway_keys_file: options.GatewayKeysFileOption = None
    allow_unauthenticated_tcp: options.AllowUnauthenticatedTcpOption = False
    max_context_tokens: options.MaxContextTokensOption = None
    policy: options.PolicyOption = PolicyName.MOIETY
    kv_memory_bytes: options.KvMemoryBytesOption = ""
    host_kv_memory_bytes: options.HostKvMemoryBytesOption = ""
    disk_cache: options.DiskCacheOption = None
    disk_cache_bytes: options.DiskCacheBytesOption = "16GiB"
    disk_cache_ttl: options.DiskCacheTtlOption = 86_400.0
    block_size: options.BlockSizeOption = None
    prefix_caching: options.PrefixCachingOption = True
    batch_timeout_ms: options.BatchTimeoutMsOption = 50.0
    role: options.RoleOption = EngineRole.BOTH
    kv_listen: options.KvListenOption = ""
    kv_transport: options.KvTransportOption = KvTransport.AUTO
    kv_buffer_bytes: options.KvBufferBytesOption = ""
    grammar_compile_cpu_s: grammar_options.GrammarCompileCpuOption = 1.0
    grammar_compile_wall_s: grammar_options.GrammarCompileWallOption = 5.0
    grammar_compile_memory_bytes: grammar_options.GrammarCompileMemoryOption = "512MiB"
    grammar_worker_memory_bytes: grammar_options.GrammarWorkerMemoryOption = "4GiB"
    grammar_queue: grammar_options.GrammarQueueOption = 64
    join_timeout_s: rank_options.JoinTimeoutOption = 60.0
    allow_unauthenticated_ranks: rank_options.AllowUnauthenticatedRanksOption = False
    exclude_rank_after_s: rank_options.ExcludeRankAfterOption = None
    rank_failure_log: rank_options.RankFailureLogOption = None
    exclude_rank_after_failures: rank_options.ExcludeRankAfterFailuresOption = None
    rank_failures_within_s: rank_options.RankFailuresWithinOption = None
    adapter: options.AdapterOption = None
    adapter_memory_bytes: options.AdapterMemoryBytesOption = ""
    adapter_disk_bytes: options.AdapterDiskBytesOption = "4GiB"
    max_adapters: options.MaxAdaptersOption = 64
    max_adapter_rank: options.MaxAdapterRankOption = 32
    drain_timeout: options.DrainTimeoutOption = 30.0
    core_silence_s: options.CoreSilenceOption = CORE_SILENCE_S
    traced_steps_per_s: options.TracedStepsOption = 20.0
    scripted: options.ScriptedOption = False
    scripted_tokens_per_step: options.ScriptedTokensPerStepOption = 1
    scripted_step_ms: options.ScriptedStepMsOption = 0.0

    def check_sizes(self) -> None:
        """Raise typer.BadParameter for an option in bytes that is not a size, whether or not it is used."""
        for field in fields(self):
            if field.name.endswith("_bytes"):
                _size_or_none(getattr(self, field.name))

    def serving_config(self, folder: Path, name: str, adapters: dict[str, str]) -> EngineConfig:
        """Return the configuration of an engine that serves gateways. Raises CheckpointError and InvalidConfig."""
        return self.engine_config(
            folder,
            name,
            kv_memory_bytes=_size_or_none(self.kv_memory_bytes),
            host_kv_memory_bytes=_size_or_none(self.host_kv_memory_bytes),
            disk_cache=str(self.disk_cache.resolve()) if self.disk_cache else "",
            disk_cache_bytes=parse_size(self.disk_cache_bytes),
            disk_cache_ttl_s=self.disk_cache_ttl,
            rank_failure_log=str(self.rank_failure_log.resolve()) if self.rank_failure_log else "",
            grammar=self._grammar_limits(),
            adapters=adapters,
            adapter_memory_bytes=_size_or_none(self.adapter_memory_bytes),
            transfer=self._transfer_config(),
            **{name: getattr(self, name) for name in _SAME_OF_SERVER},
        )

    def _grammar_limits(self) -> GrammarLimits:
        return GrammarLimits(
            compile_cpu_s=self.grammar_compile_cpu_s,
            compile_wall_s=self.grammar_compile_wall_s,
            compile_memory_bytes=parse_size(self.grammar_compile_memory_bytes),
            worker_memory_bytes=parse_size(self.grammar_worker_memory_bytes),
            max_waiting_per_tenant=self.grammar_queue,
        )

    def _transfer_config(self) -> TransferConfig:
        return TransferConfig(
            role=self.role,
            listen=self.kv_listen or (_beside(self.listen) if self.role is EngineRole.DECODE else ""),
            key_file=str(self.curve_key_file or ""),
            way=self.kv_transport,
            buffer_bytes=_size_or_none(self.kv_buffer_bytes),
        )


def _beside(listen: str) -> str:
    """Return another port of the address that gateways connect to; for an ipc address, one on this host."""
    host = listen.removeprefix("tcp://").rpartition(":")[0] if listen.startswith("tcp://") else "127.0.0.1"
    return f"tcp://{host}:0"
