"""Options of an engine that serves gateways: those of `moiety engine`, most of which `moiety serve` has too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moiety_options import panels
from moiety_options.declaration import option
from moiety_options.model_options import ENV, ServedModelOptions
from moiety_wire.engine_choices import MAX_TRACED_PER_S, FleetFairness, KvTransport, PolicyName
from moiety_wire.roles import EngineRole

_batching = partial(option, env=ENV, panel=panels.BATCHING)
_kv_cache = partial(option, env=ENV, panel=panels.KV_CACHE)
_structured = partial(option, env=ENV, panel=panels.STRUCTURED_OUTPUTS)
_images = partial(option, env=ENV, panel=panels.IMAGES)
_adapters = partial(option, env=ENV, panel=panels.ADAPTERS)
_distributed = partial(option, env=ENV, panel=panels.DISTRIBUTED)
_roles = partial(option, env=ENV, panel=panels.ROLES)
_network = partial(option, env=ENV, panel=panels.NETWORK)
_usage = partial(option, env=ENV, panel=panels.USAGE)
_process = partial(option, env=ENV, panel=panels.PROCESS)
_simulated = partial(option, env=ENV, panel=panels.SIMULATED)


@dataclass(slots=True, kw_only=True)
class ServingOptions(ServedModelOptions):
    """Options of an engine that serves requests, wherever it listens. `moiety serve` passes them to its engine."""

    policy: PolicyName = _batching(
        PolicyName.MOIETY,
        "Scheduling policy under continuous batching. The policies other than moiety are for comparison.",
    )
    fleet_fairness: FleetFairness = _batching(
        FleetFairness.AUTO,
        "Exchange the service of tenants with the other replicas of the model, through the gateways, so that a "
        "tenant's share holds over all of them. auto enables this with the policies that have counters of tenants: "
        "moiety, vtc and dlpm.",
    )
    batch_timeout_ms: float = _batching(
        50.0, "Longest time that --batching dynamic waits for a batch to fill, in milliseconds.", min=0
    )
    kv_memory_bytes: int | None = _kv_cache(
        None,
        "Device memory for the KV cache, such as 4GiB. If not given, a share of the memory that is available.",
        is_size=True,
    )
    host_kv_memory_bytes: int | None = _kv_cache(
        None,
        "Host memory that KV blocks are swapped to, such as 16GiB; 0 disables it. If not given, a share of the host "
        "memory with a GPU, and 0 on a CPU.",
        is_size=True,
    )
    disk_cache: Path | None = _kv_cache(
        None,
        "Folder in which the prefix cache stores KV blocks that outlive the engine. Each engine needs its own folder.",
        file_okay=False,
    )
    disk_cache_bytes: int = _kv_cache(
        16 << 30, "Largest size of the prefix cache on disk, such as 200GiB.", is_size=True
    )
    disk_cache_ttl_s: float = _kv_cache(
        86_400.0, "Time after its last use at which a KV block on disk is deleted, in seconds.", min=1
    )
    block_size: int | None = _kv_cache(
        None,
        "Number of tokens in a KV block. If not given, 16 on a GPU and 4 on a CPU, times --decode-context-parallel, "
        "which must divide it.",
        min=1,
    )
    prefix_caching: bool = _kv_cache(True, "Reuse the KV blocks of earlier requests that have the same prefix.")
    image_cache_bytes: int = _images(
        512 << 20,
        "Device memory for encoded images, such as 1GiB; 0 keeps none. Only for models with a vision encoder.",
        is_size=True,
    )
    image_decoded_cache_bytes: int = _images(
        256 << 20,
        "Host memory for the pixels of recently decoded images, such as 1GiB; 0 keeps none. Images that are sent "
        "again are not decoded again.",
        is_size=True,
    )
    max_images: int = _images(16, "Largest number of images in one prompt.", min=1)
    max_image_bytes: int = _images(20 << 20, "Largest size of one image file, such as 20MiB.", is_size=True)
    max_image_source_pixels: int = _images(
        36_000_000, "Largest number of pixels of an image file. An image with more is rejected.", min=1
    )
    max_image_pixels: int = _images(
        1 << 21, "Largest number of pixels of an image for the model. A larger image is resized to it.", min=1
    )
    image_decode_cpu_s: float = _images(
        5.0, "Largest CPU time to decode one image, in seconds. An image that needs more is rejected.", min=0.05, max=60
    )
    image_decode_memory_bytes: int = _images(
        512 << 20, "Largest memory to decode one image, such as 512MiB.", is_size=True
    )
    image_pixel_memory_bytes: int = _images(
        4 << 30,
        "Largest host memory for the pixels of all open requests, such as 8GiB. Further requests with images are "
        "rejected with 429.",
        is_size=True,
    )
    image_queue: int = _images(
        64,
        "Largest number of images of one tenant that wait to be decoded. Further requests are rejected with 429.",
        min=1,
    )
    grammar_compile_cpu_s: float = _structured(
        1.0,
        "Largest CPU time for the compilation of one grammar, in seconds. A grammar that needs more is rejected.",
        min=0.05,
        max=60,
    )
    grammar_compile_wall_s: float = _structured(
        5.0,
        "Largest elapsed time for the compilation of one grammar, in seconds. A grammar that needs more is rejected.",
        min=0.05,
        max=60,
    )
    grammar_compile_memory_bytes: int = _structured(
        512 << 20, "Largest memory for the compilation of one grammar, such as 512MiB.", is_size=True
    )
    grammar_worker_memory_bytes: int = _structured(
        4 << 30, "Largest memory of the process that advances the grammars of all requests, such as 4GiB.", is_size=True
    )
    grammar_queue: int = _structured(
        64,
        "Largest number of grammars of one tenant that wait for compilation. Further requests are rejected with 429.",
        min=1,
    )
    adapter: list[str] | None = _adapters(
        None, "NAME=FOLDER of a LoRA adapter in PEFT format to load at the start. May be given several times."
    )
    adapter_memory_bytes: int | None = _adapters(
        None,
        "Device memory for adapters on each rank, such as 2GiB; 0 disables adapters. If not given, 1 GiB on a CPU and "
        "1/64 of the memory of a GPU.",
        is_size=True,
    )
    adapter_disk_bytes: int = _adapters(
        4 << 30,
        "Largest size on disk of the adapters that gateways upload, in the folder for temporary files.",
        is_size=True,
    )
    max_adapters: int = _adapters(64, "Largest number of adapters in device memory at the same time.", min=1)
    max_adapter_rank: int = _adapters(32, "Largest rank of an adapter that the engine accepts.", min=1)
    join_timeout_s: float = _distributed(
        60.0, "Longest time that ranks wait for each other at the start, in seconds.", min=1
    )
    allow_unauthenticated_ranks: bool = _distributed(
        False,
        "Allow ranks on different hosts to communicate without authentication. Use it only on a private network.",
    )
    exclude_rank_after_s: float | None = _distributed(
        None,
        "Time after which the ranks start without ranks that have not joined, in seconds, if the remaining ones can "
        "hold all experts. If not given, they wait for all ranks.",
        min=1,
    )
    rank_failure_log: Path | None = _distributed(
        None,
        "File in which rank 0 records failed ranks for the next start. It requires --exclude-rank-after-s.",
        dir_okay=False,
    )
    exclude_rank_after_failures: int | None = _distributed(
        None,
        "Number of recent failures in --rank-failure-log after which a rank is excluded. If not given, 3.",
        min=1,
    )
    rank_failures_within_s: float | None = _distributed(
        None,
        "Age up to which a failure of a rank counts as recent, in seconds. It must exceed the duration of a few "
        "starts. If not given, 600.",
        min=1,
    )
    metrics_listen: str | None = _network(
        None,
        "host:port at which the engine itself exposes /metrics for Prometheus; port 0 selects a free one. The gateway "
        "exposes most of these metrics as well.",
    )
    usage_journal: Path | None = _usage(
        None, "File to which the engine appends the usage of each request, for `moiety usage reconcile`."
    )
    core_silence_s: float = _process(
        60.0,
        "Time without a message from the engine core after which it counts as hung and is killed, in seconds. It must "
        "exceed the duration of any step.",
        min=1,
    )
    traced_steps_per_s: float = _process(
        20.0,
        "Largest number of steps per second that are traced in detail; 0 disables step traces.",
        min=0,
        max=MAX_TRACED_PER_S,
    )
    scripted: bool = _simulated(
        False, "Run without a model: outputs repeat the tokens of the prompt. For tests and measurements."
    )
    scripted_tokens_per_step: int = _simulated(
        1, "Number of tokens that each request receives in a step, with --scripted.", min=1
    )
    scripted_step_ms: float = _simulated(0.0, "Duration of a step in milliseconds, with --scripted.", min=0)
    sleep_folder: Path | None = _process(
        None,
        "Folder for the weights of the engine in sleep mode, so that they need no host memory. If not given, they stay "
        "in host memory.",
        file_okay=False,
    )


@dataclass(slots=True, kw_only=True)
class EngineOptions(ServingOptions):
    """Options of `moiety engine`."""

    listen: str = _network(
        "tcp://127.0.0.1:5757",
        "ZeroMQ address at which gateways connect, tcp:// or ipc://. TCP port 0 selects a free one.",
    )
    address_file: Path | None = _network(
        None, "File to which the engine writes its actual address when it is ready to serve."
    )
    curve_key_file: Path | None = _network(
        None,
        "File with the secret CURVE key of the engine (Z85, 40 characters). Connections are then encrypted.",
    )
    gateway_keys_file: Path | None = _network(
        None,
        "File with the public CURVE keys (Z85, one per line) of the gateways that may connect. Others are rejected. "
        "The engine reads the file again when it changes.",
    )
    allow_unauthenticated_tcp: bool = _network(
        False,
        "Listen beyond loopback without keys. Every process that can reach the address can then control the engine.",
    )
    unacknowledged_usage: Path | None = _usage(
        None,
        "File that preserves the usage that gateways have not yet acknowledged until the next start of the engine.",
    )
    role: EngineRole = _roles(
        EngineRole.BOTH,
        "Role of the engine. prefill engines compute prompts and transfer their KV to decode engines, which generate "
        "the output.",
    )
    kv_listen: str = _roles(
        "",
        "ZeroMQ address at which the engine receives KV from other engines, tcp://. If not given, a free port on the "
        "host of --listen with --role decode.",
    )
    kv_transport: KvTransport = _roles(
        KvTransport.AUTO,
        "Transport of KV to other engines. auto uses shared memory on the same host, otherwise TCP. nixl needs NIXL at "
        "both engines, which both get this value.",
    )
    kv_buffer_bytes: int | None = _roles(
        None,
        "Host memory for KV in transfer, such as 4GiB. If not given, a tenth of the available memory.",
        is_size=True,
    )
    device_group: str = _process(
        "",
        "Name of the group of engines that share this engine's device. The gateway keeps at most device_group_awake of "
        "them awake and puts the others into sleep mode. If not given, the engine shares its device with no other one.",
    )
    drain_s: int = _process(30, "Longest time that a stop waits for running requests to finish, in seconds.", min=0)
