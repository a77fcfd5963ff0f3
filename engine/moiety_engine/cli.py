"""The command `moiety engine`: options to settings, then the front process. Imports no torch; the core does."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import msgspec
import typer
import zmq

from moiety_engine.checkpoint import model_name, resolve_checkpoint
from moiety_engine.config import (
    Batching,
    EngineConfig,
    ExpertEviction,
    GrammarLimits,
    KvTransport,
    LoadFormat,
    MoeKernel,
    Offload,
    OffloadConfig,
    Overlap,
    PolicyName,
    Speculate,
    TransferConfig,
)
from moiety_engine.distribution.layout import layout_of
from moiety_engine.distribution.rendezvous_address import (
    meeting_from,
    require_hosts_apart,
    require_private_ranks,
    require_ranks,
)
from moiety_engine.errors import CheckpointError, InvalidConfig
from moiety_engine.logs import configure_logs
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server import grammar_options, offload_options, options, rank_options
from moiety_engine.server.core_link import CoreLink, ProcessCore
from moiety_engine.server.gateway_keys import read_gateway_keys, refuse_strangers
from moiety_engine.server.process import MakeCore, run_front
from moiety_engine.server.settings import CORE_SILENCE_S, ServerSettings
from moiety_text.errors import TextError
from moiety_text.folder import TextModel, read_text_model
from moiety_wire.roles import EngineRole

CORE_MODULE = "moiety_engine.core"
WRONG_USE = 2  # exit code
CANNOT_LISTEN = 1

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `1500000`, `512M`, `4GiB` (1024) or `4GB` (1000). Raises typer.BadParameter."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 4GiB, 512MB or a number of bytes")
    number, unit, binary = found.groups()
    decimal = text.strip().upper().endswith("B") and not binary
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1000 if decimal else 1024) ** power)


def named_folders(given: list[str]) -> dict[str, str]:
    """Of `NAME=FOLDER`, each name once. Raises InvalidConfig."""
    found: dict[str, str] = {}
    for one in given:
        name, _, folder = one.partition("=")
        if not ADAPTER_NAME.fullmatch(name) or not folder:
            raise InvalidConfig(f"--adapter {one!r}: write NAME=FOLDER, the name of letters, digits, '.', '_' and '-'")
        if name in found:
            raise InvalidConfig(f"--adapter {name!r} is given twice: choose another name")
        if not Path(folder).is_dir():
            raise InvalidConfig(f"--adapter {name}: there is no folder {folder}")
        found[name] = str(Path(folder).resolve())
    return found


def engine(
    model: options.ModelOption = "",
    name: options.NameOption = "",
    listen: options.ListenOption = "tcp://127.0.0.1:5757",
    address_file: options.AddressFileOption = None,
    usage_journal: options.UsageJournalOption = None,
    unacknowledged_usage: options.UnacknowledgedUsageOption = None,
    metrics_listen: options.MetricsListenOption = None,
    curve_key_file: options.CurveKeyFileOption = None,
    gateway_keys_file: options.GatewayKeysFileOption = None,
    allow_unauthenticated_tcp: options.AllowUnauthenticatedTcpOption = False,
    device: options.DeviceOption = options.DeviceChoice.auto,
    dtype: options.DtypeOption = options.Dtype.auto,
    quantization: options.QuantizationOption = options.Quantization.auto,
    kv_dtype: options.KvDtypeOption = options.KvDtype.auto,
    moe_kernel: options.MoeKernelOption = MoeKernel.AUTO,
    batch_invariant: options.BatchInvariantOption = False,
    threads: options.ThreadsOption = None,
    load_format: options.LoadFormatOption = LoadFormat.AUTO,
    batching: options.BatchingOption = Batching.CONTINUOUS,
    max_batch_tokens: options.MaxBatchTokensOption = None,
    max_running: options.MaxRunningOption = None,
    max_context_tokens: options.MaxContextTokensOption = None,
    policy: options.PolicyOption = PolicyName.MOIETY,
    kv_memory_bytes: options.KvMemoryBytesOption = "",
    host_kv_memory_bytes: options.HostKvMemoryBytesOption = "",
    disk_cache: options.DiskCacheOption = None,
    disk_cache_bytes: options.DiskCacheBytesOption = "16GiB",
    disk_cache_ttl: options.DiskCacheTtlOption = 86_400.0,
    block_size: options.BlockSizeOption = None,
    prefix_caching: options.PrefixCachingOption = True,
    static_batch_size: options.StaticBatchSizeOption = 8,
    batch_timeout_ms: options.BatchTimeoutMsOption = 50.0,
    overlap: options.OverlapOption = Overlap.AUTO,
    speculate: options.SpeculateOption = Speculate.OFF,
    speculate_tokens: options.SpeculateTokensOption = 7,
    draft_model: options.DraftModelOption = "",
    cuda_graphs: options.CudaGraphsOption = True,
    role: options.RoleOption = EngineRole.BOTH,
    kv_listen: options.KvListenOption = "",
    kv_transport: options.KvWayOption = KvTransport.AUTO,
    kv_buffer_bytes: options.KvLandingBytesOption = "",
    offload: offload_options.OffloadOption = Offload.NONE,
    expert_memory_bytes: offload_options.ExpertMemoryBytesOption = "",
    offload_folder: offload_options.OffloadFolderOption = "",
    expert_eviction: offload_options.ExpertEvictionOption = ExpertEviction.FREQUENCY,
    expert_prefetch: offload_options.ExpertPrefetchOption = True,
    grammar_compile_cpu_s: grammar_options.GrammarCompileCpuOption = 1.0,
    grammar_compile_wall_s: grammar_options.GrammarCompileWallOption = 5.0,
    grammar_compile_memory_bytes: grammar_options.GrammarCompileMemoryOption = "512MiB",
    grammar_worker_memory_bytes: grammar_options.GrammarWorkerMemoryOption = "4GiB",
    grammar_queue: grammar_options.GrammarQueueOption = 64,
    tp: rank_options.TpOption = 1,
    dp_attention: rank_options.DpAttentionOption = 1,
    ep: rank_options.EpOption = 1,
    pp: rank_options.PpOption = 1,
    ffn_ranks: rank_options.ExpertRanksOption = 0,
    micro_batches: rank_options.MicroBatchesOption = 2,
    micro_batch_tokens: rank_options.MicroBatchTokensOption = 32,
    redundant_experts: rank_options.RedundantExpertsOption = 0,
    rebalance_every_s: rank_options.RebalanceEveryOption = None,
    join_timeout_s: rank_options.JoinTimeoutOption = 60.0,
    allow_unauthenticated_ranks: rank_options.AllowUnauthenticatedRanksOption = False,
    exclude_rank_after_s: rank_options.MaskAfterOption = None,
    rank_failure_log: rank_options.RankLossesOption = None,
    mask_after_losses: rank_options.MaskAfterLossesOption = None,
    rank_losses_within_s: rank_options.RankLossesWithinOption = None,
    adapter: options.AdapterOption = None,
    adapter_memory_bytes: options.AdapterMemoryBytesOption = "",
    adapter_disk_bytes: options.AdapterDiskBytesOption = "4GiB",
    max_adapters: options.MaxAdaptersOption = 64,
    max_adapter_rank: options.MaxAdapterRankOption = 32,
    drain_timeout: options.DrainTimeoutOption = 30.0,
    core_silence_s: options.CoreSilenceOption = CORE_SILENCE_S,
    traced_steps_per_s: options.TracedStepsOption = 20.0,
    scripted: options.ScriptedOption = False,
    scripted_tokens_per_step: options.ScriptedTokensPerStepOption = 1,
    scripted_step_ms: options.ScriptedStepMsOption = 0.0,
) -> None:
    """Run one engine, a replica of one model, for gateways to connect to.

    Prints one line of JSON when it can serve; logs go to standard error. SIGTERM and Ctrl-C finish the open requests
    first. Ends with 0 after that, 2 for wrong options or a bad checkpoint, 1 if it cannot listen, 70 if the core died
    or hung while serving, 71 if the core could not start. A rank that a launcher started beside the first one ends with
    0 when that does, 4 if it could not start, 5 if another rank was lost.
    """
    configure_logs()
    kv_bytes = parse_size(kv_memory_bytes) if kv_memory_bytes else None
    host_bytes = parse_size(host_kv_memory_bytes) if host_kv_memory_bytes else None
    try:
        if not allow_unauthenticated_tcp:
            refuse_strangers("--listen", listen, curve_key_file=curve_key_file, gateway_keys_file=gateway_keys_file)
            refuse_strangers("--kv-listen", kv_listen, curve_key_file=curve_key_file)
        adapters = named_folders(adapter or [])
        settings = ServerSettings(
            model=name or ("scripted" if scripted and not model else model_name(model)),
            listen=listen,
            address_file=address_file,
            usage_journal=_checked(usage_journal),
            unacknowledged_usage=unacknowledged_usage,
            metrics_listen=metrics_listen,
            drain_timeout_s=drain_timeout,
            core_silence_s=core_silence_s,
            adapters=tuple(adapters),
            adapter_disk_bytes=parse_size(adapter_disk_bytes),
            curve_secret_key=_read_curve_key(curve_key_file),
            gateway_keys_file=_checked_gateway_keys(gateway_keys_file, curve_key_file),
            role=role,
        )
        if scripted:
            _refuse_what_has_no_kv(role, kv_listen, disk_cache)
            script = _script(scripted_tokens_per_step, scripted_step_ms, max_context_tokens, max_running)
            script = msgspec.structs.replace(script, traced_steps_per_s=traced_steps_per_s)
            text, make_core = scripted_text_model(), _scripted(script)
        else:
            folder = resolve_checkpoint(model)
            config = EngineConfig(
                model=str(folder),
                name=settings.model,
                device=device.value,
                dtype=dtype.value,
                quantization=quantization.value,
                kv_dtype=kv_dtype.value,
                moe_kernel=moe_kernel,
                batch_invariant=batch_invariant,
                batching=batching,
                max_batch_tokens=max_batch_tokens,
                max_running=max_running,
                kv_memory_bytes=kv_bytes,
                host_kv_memory_bytes=host_bytes,
                disk_cache=str(disk_cache.resolve()) if disk_cache else "",
                disk_cache_bytes=parse_size(disk_cache_bytes),
                disk_cache_ttl_s=disk_cache_ttl,
                policy=policy,
                block_size=block_size,
                max_context_tokens=max_context_tokens,
                num_threads=threads,
                prefix_caching=prefix_caching,
                batch_timeout_ms=batch_timeout_ms,
                static_batch_size=static_batch_size,
                load_format=load_format,
                overlap=overlap,
                speculate=speculate,
                speculate_tokens=speculate_tokens,
                draft_model=str(resolve_checkpoint(draft_model)) if draft_model else "",
                cuda_graphs=cuda_graphs,
                tp=tp,
                dp_attention=dp_attention,
                ep=ep,
                pp=pp,
                ffn_ranks=ffn_ranks,
                micro_batches=micro_batches,
                micro_batch_tokens=micro_batch_tokens,
                redundant_experts=redundant_experts,
                rebalance_every_s=rebalance_every_s,
                join_timeout_s=join_timeout_s,
                allow_unauthenticated_ranks=allow_unauthenticated_ranks,
                exclude_rank_after_s=exclude_rank_after_s,
                rank_failure_log=str(rank_failure_log.resolve()) if rank_failure_log else "",
                mask_after_losses=mask_after_losses,
                rank_losses_within_s=rank_losses_within_s,
                offload=OffloadConfig(
                    what=offload,
                    memory_bytes=parse_size(expert_memory_bytes) if expert_memory_bytes else None,
                    folder=offload_folder,
                    eviction=expert_eviction,
                    prefetch=expert_prefetch,
                ),
                grammar=GrammarLimits(
                    compile_cpu_s=grammar_compile_cpu_s,
                    compile_wall_s=grammar_compile_wall_s,
                    compile_memory_bytes=parse_size(grammar_compile_memory_bytes),
                    worker_memory_bytes=parse_size(grammar_worker_memory_bytes),
                    max_waiting_per_tenant=grammar_queue,
                ),
                adapters=adapters,
                adapter_memory_bytes=parse_size(adapter_memory_bytes) if adapter_memory_bytes else None,
                max_adapters=max_adapters,
                max_adapter_rank=max_adapter_rank,
                traced_steps_per_s=traced_steps_per_s,
                transfer=TransferConfig(
                    role=role,
                    listen=kv_listen or (_beside(listen) if role is EngineRole.DECODE else ""),
                    key_file=str(curve_key_file or ""),
                    way=kv_transport,
                    buffer_bytes=parse_size(kv_buffer_bytes) if kv_buffer_bytes else None,
                ),
            )
            _follow_if_launched_so(config)
            text, make_core = _text_and_process(folder, config, settings)
        ending = run_front(settings, text, make_core, say=_say)
    except (CheckpointError, InvalidConfig, TextError) as exc:
        typer.echo(f"Error: {exc}", err=True)
        raise typer.Exit(WRONG_USE) from exc
    except zmq.ZMQError as exc:
        typer.echo(f"Error: cannot listen on {listen}: {exc}; choose another --listen", err=True)
        raise typer.Exit(CANNOT_LISTEN) from exc
    raise typer.Exit(ending)


def _refuse_what_has_no_kv(role: EngineRole, kv_listen: str, disk_cache: Path | None) -> None:
    if role is not EngineRole.BOTH or kv_listen or disk_cache:
        raise InvalidConfig(
            "a scripted engine has no KV: leave --role, --kv-listen and --disk-cache out, or --scripted"
        )


def _beside(listen: str) -> str:
    """Another port of the address that gateways connect to; of a file, one of this host."""
    host = listen.removeprefix("tcp://").rpartition(":")[0] if listen.startswith("tcp://") else "127.0.0.1"
    return f"tcp://{host}:0"


def _script(tokens_per_step: int, step_ms: float, max_context_tokens: int | None, max_running: int | None) -> Script:
    script = Script(tokens_per_step=tokens_per_step, step_delay_s=step_ms / 1000)
    if max_context_tokens is not None:
        script = msgspec.structs.replace(script, max_context_tokens=max_context_tokens)
    if max_running is not None:
        script = msgspec.structs.replace(script, max_running=max_running)
    return script


def _scripted(script: Script) -> MakeCore:
    def make(context: zmq.Context[zmq.Socket[bytes]]) -> CoreLink:
        return ScriptedCore(script)

    return make


def _text_and_process(folder: Path, config: EngineConfig, settings: ServerSettings) -> tuple[TextModel, MakeCore]:
    def make(context: zmq.Context[zmq.Socket[bytes]]) -> CoreLink:
        silence_s = settings.core_silence_s
        return ProcessCore(context, CORE_MODULE, config, listen=settings.listen, silence_s=silence_s)

    return read_text_model(folder), make


def _follow_if_launched_so(config: EngineConfig) -> None:
    """Where a launcher started several ranks, all with the same command, only the first has a front."""
    layout, meeting = layout_of(config), meeting_from(os.environ)
    if meeting is None:
        return
    require_ranks(layout, meeting)
    require_hosts_apart(config.exclude_rank_after_s, meeting)
    require_private_ranks(meeting, allowed=config.allow_unauthenticated_ranks)
    if meeting.rank:
        from moiety_engine.core.worker import follow_until_end  # noqa: PLC0415 - imports torch

        raise typer.Exit(follow_until_end(config, meeting))


def _checked(usage_journal: Path | None) -> Path | None:
    if usage_journal is not None:
        try:
            usage_journal.open("ab").close()
        except OSError as exc:
            raise InvalidConfig(f"--usage-journal {usage_journal} cannot be written: {exc.strerror}") from exc
    return usage_journal


def _read_curve_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
        zmq.curve_public(key)
    except OSError as exc:
        raise InvalidConfig(f"--curve-key-file {path} cannot be read: {exc.strerror}") from exc
    except (zmq.ZMQError, ValueError) as exc:
        raise InvalidConfig(f"--curve-key-file {path} holds no secret CURVE key, 40 characters of Z85") from exc
    return key


def _checked_gateway_keys(path: Path | None, curve_key_file: Path | None) -> Path | None:
    if path is not None:
        if curve_key_file is None:
            raise InvalidConfig(f"--gateway-keys-file {path} needs --curve-key-file; set both")
        read_gateway_keys(path)
    return path


def _say(line: str) -> None:
    typer.echo(line)
    sys.stdout.flush()
