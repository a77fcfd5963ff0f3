"""The engine's configuration from the values of its command-line options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig, GrammarLimits, ImageOptions, OffloadConfig, TransferConfig
from moiety_options.engine_options import EngineOptions
from moiety_options.model_options import ModelOptions
from moiety_wire.roles import EngineRole
from moiety_wire.shared_fields import field_names


def engine_config(options: ModelOptions, folder: Path, name: str, **further: Any) -> EngineConfig:
    """Return the configuration of an engine for the checkpoint in `folder`.

    An option and a field of the configuration of the same name have the same value. `further`: more fields. Raises
    CheckpointError and InvalidConfig.
    """
    chosen = {
        "model": str(folder),
        "name": name,
        "draft_model": str(resolve_checkpoint(options.draft_model)) if options.draft_model else "",
        "device": options.device.value,
        "dtype": options.dtype.value,
        "quantization": options.quantization.value,
        "kv_dtype": options.kv_dtype.value,
        "num_threads": options.threads,
        "offload": _offload_config(options),
    }
    return EngineConfig(**{**same_values(options, EngineConfig), **chosen, **further})


def serving_config(options: EngineOptions, folder: Path, name: str, adapters: dict[str, str]) -> EngineConfig:
    """Return the configuration of an engine that serves gateways. Raises CheckpointError and InvalidConfig."""
    return engine_config(
        options,
        folder,
        name,
        sleep_folder=str(options.sleep_folder.resolve()) if options.sleep_folder else "",
        disk_cache=str(options.disk_cache.resolve()) if options.disk_cache else "",
        rank_failure_log=str(options.rank_failure_log.resolve()) if options.rank_failure_log else "",
        grammar=_grammar_limits(options),
        images=image_options(options),
        adapters=adapters,
        transfer=_transfer_config(options),
    )


def same_values(options: ModelOptions, target: type, prefix: str = "") -> dict[str, Any]:
    """Return the values of the fields of a struct or dataclass whose names, after the prefix, are names of options."""
    names = set(field_names(type(options)))
    return {name: getattr(options, prefix + name) for name in field_names(target) if prefix + name in names}


def _offload_config(options: ModelOptions) -> OffloadConfig:
    values = same_values(options, OffloadConfig, "expert_")
    return OffloadConfig(what=options.offload, folder=options.offload_folder, **values)


def _grammar_limits(options: EngineOptions) -> GrammarLimits:
    values = same_values(options, GrammarLimits, "grammar_")
    return GrammarLimits(max_waiting_per_tenant=options.grammar_queue, **values)


def image_options(options: EngineOptions) -> ImageOptions:
    """Return the limits of images that the options set."""
    return ImageOptions(
        max_images=options.max_images,
        max_bytes=options.max_image_bytes,
        max_source_pixels=options.max_image_source_pixels,
        max_pixels=options.max_image_pixels,
        decode_wall_s=3 * options.image_decode_cpu_s,
        max_decoding=options.image_queue,
        **same_values(options, ImageOptions, "image_"),
    )


def _transfer_config(options: EngineOptions) -> TransferConfig:
    return TransferConfig(
        role=options.role,
        listen=options.kv_listen or (_beside(options.listen) if options.role is EngineRole.DECODE else ""),
        key_file=str(options.curve_key_file or ""),
        transport=options.kv_transport,
        buffer_bytes=options.kv_buffer_bytes,
    )


def _beside(listen: str) -> str:
    """Return another port of the address that gateways connect to; for an ipc address, one on this host."""
    host = listen.removeprefix("tcp://").rpartition(":")[0] if listen.startswith("tcp://") else "127.0.0.1"
    return f"tcp://{host}:0"
