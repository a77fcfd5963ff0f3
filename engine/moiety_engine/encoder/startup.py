"""Startup of an encoder's loop from the engine's configuration. Options that encoders do not have are refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moiety_engine.config import Offload, Speculate
from moiety_engine.encoder.config import read_encoder_spec
from moiety_engine.encoder.loop import EncoderLoop
from moiety_engine.encoder.network import load_encoder
from moiety_engine.errors import InvalidConfig
from moiety_wire.engine_choices import Batching, LoadFormat
from moiety_wire.roles import EngineRole

if TYPE_CHECKING:
    from moiety_engine.config import EngineConfig


def load_encoder_loop(config: EngineConfig, num_ranks: int = 1) -> EncoderLoop:
    """Load the checkpoint and return its loop. Raises EngineError with advice."""
    _refuse_unavailable(config, num_ranks)
    spec = read_encoder_spec(Path(config.model), config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    is_half = config.dtype == "bfloat16" or (config.dtype == "auto" and kind == "cuda" and spec.dtype == "bfloat16")
    dtype = torch.bfloat16 if is_half else torch.float32
    network = load_encoder(Path(config.model), spec, torch.device(kind), dtype)
    return EncoderLoop(network, max_batch_tokens=config.max_batch_tokens, max_inputs=config.max_running)


def _refuse_unavailable(config: EngineConfig, num_ranks: int) -> None:
    """Raise InvalidConfig for options that need a KV cache, generation or several ranks."""
    several = num_ranks > 1 or config.num_ranks > 1 or config.ep > 1
    refused = {
        "several ranks (--tp, --dp-attention, --ep, --pp, --ffn-ranks)": several,
        "--speculate": config.speculate is not Speculate.OFF,
        "--adapter": bool(config.adapters),
        "--role and --kv-listen": config.transfer.role is not EngineRole.BOTH or bool(config.transfer.listen),
        "--disk-cache": bool(config.disk_cache),
        "--offload": config.offload.what is not Offload.NONE,
        "--quantization": config.quantization != "auto",
        "--kv-dtype": config.kv_dtype != "auto",
        "--batch-invariant": config.batch_invariant,
        "--load-format dummy": config.load_format is LoadFormat.DUMMY,
        "--batching other than continuous": config.batching is not Batching.CONTINUOUS,
    }
    if found := [name for name, is_set in refused.items() if is_set]:
        raise InvalidConfig(f"{', '.join(found)}: not available for encoder models; leave them out")
