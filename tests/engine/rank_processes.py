"""Processes of ranks on gloo, small checkpoints for them, and the comparison with a single rank."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import packed_checkpoints
from tests.conftest import free_port

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.distribution.layout import RankPosition, layout_of
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.families import read_spec
from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.quantize.writing import write_quantized
from moiety_kernels.quantization import FORMATS
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

SMALL: dict[str, Any] = {
    "vocab_size": 385,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 64}
    | {"intermediate_size": 128, "mlp_only_layers": [1], "num_hidden_layers": 3, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64},
    "deepseek_v3": {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    | {"v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 256}
    | {"intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "deepseek_v32": {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    | {"v_head_dim": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 64}
    | {"intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    | {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 8},
    "deepseek_v4": {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 48}
    | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
    | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, "sliding_window": 12}
    | {"mlp_layer_types": ["hash_moe", "moe", "moe"], "qk_rope_head_dim": 16, "o_groups": 4, "o_lora_rank": 16}
    | {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 4, "moe_intermediate_size": 256}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 64}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 64},
    "granitemoehybrid": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"shared_intermediate_size": 64, "mamba_n_heads": 2, "mamba_n_groups": 2, "mamba_d_state": 32},
    "granitemoehybrid, one group": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"shared_intermediate_size": 128, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 32},
    "kimi_linear": {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"intermediate_size": 64, "moe_intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"linear_num_heads": 2, "linear_head_dim": 64, "num_key_value_heads": 4, "pad_token_id": None},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"]}
    | {"n_routed_experts": 8, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "head_dim": 16}
    | {"mamba_num_heads": 2, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 32},
    "nemotron_h, latent": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"] * 2}
    | {"n_routed_experts": 8, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "head_dim": 16}
    | {"mamba_num_heads": 2, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 32, "moe_latent_size": 32},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}
    | {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    | {"mamba_dt_rank": 16, "mamba_d_state": 16, "mamba_proj_bias": True},
    "longcat_flash": {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    | {"v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 16, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 256}
    | {"num_layers": 2, "num_hidden_layers": 4, "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3},
    "jetmoe": {"num_key_value_heads": 4, "kv_channels": 16, "num_local_experts": 8, "intermediate_size": 64},
    "minimax": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
    "zaya": {"num_experts": 8, "moe_intermediate_size": 64, "router_hidden_size": 32, "head_dim": 16}
    | {"tie_word_embeddings": False, "pad_token_id": None},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16}
    | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}
BLOCK = 32  # rows and columns that share a scale
NARROW: dict[str, tuple[str, dict[str, Any]]] = {  # checkpoints in few bits: their families, and what they must be
    "float8 blocks": ("deepseek_v3", {"q_lora_rank": 64, "intermediate_size": 128}),
    "float8 blocks, grouped heads": ("qwen3_moe", {}),
    "mxfp4": ("gpt_oss", {}),
    "int8": ("qwen3_moe", {"head_dim": 32}),
    "int4": ("mixtral", {"head_dim": 32}),
    "act-order": ("qwen3_moe", {}),
}
NEAR = 1e-4  # between the two best logits: the order of a sum may decide which one wins
BLOCK_SIZE, NUM_BLOCKS = 4, 20  # the longest request takes at most 16 of them
NUM_WINDOWED_BLOCKS = 15  # the memory if blocks behind windows are freed


class Checkpoints(dict[str, Path]):
    """Folders of checkpoints by their family, or their name in `NARROW`: each is written at its first use."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._tmp_path_factory = tmp_path_factory

    def __missing__(self, name: str) -> Path:
        family, more = NARROW.get(name, (name, {}))
        folder = write_checkpoint(self._tmp_path_factory.mktemp(family), family, **more)
        if name in FORMATS:
            folder, wide = self._tmp_path_factory.mktemp("narrow") / name, folder
            write_quantized(wide, folder, FORMATS[name], lambda *_: None)
        elif name in NARROW:
            put_in_few_bits(folder, name)
        self[name] = folder
        return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Checkpoints(tmp_path_factory)


def write_checkpoint(folder: Path, family: str, **more: Any) -> Path:
    """Write a random checkpoint. DeepSeek's and LongCat's route all tokens to two experts, LongCat's to a third too.
    The hash of DeepSeek-V4's tokens chooses distinct experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(family))
    config = AutoConfig.for_model(family.partition(",")[0], **(SMALL | FAMILIES[family] | more))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("tid2eid"):
                value.copy_(torch.rand(len(value), config.n_routed_experts).argsort(dim=1)[:, : value.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                value.zero_()[:2] = 50.0
            elif name.endswith(("bias", "biases", "sinks", "temp")):
                value.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def put_in_act_order(name: str) -> packed_checkpoints.Writer:
    """Return the writer of a matrix whose inputs belong to groups in an order of its product."""
    for part, of in {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.items():
        name = name.replace(part, of)
    return partial(packed_checkpoints.act_ordered, seed=sum(name.encode()))


def put_in_few_bits(folder: Path, how: str) -> Path:
    """Replace the matrices of layers by random ones in float8 blocks, or experts by random ones in mxfp4.

    "act-order": round all of them as GPTQ does with desc_act."""
    if how == "act-order":
        gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
        packed_checkpoints.write(folder, gptq, put_in_act_order)
        return folder
    settings: dict[str, Any] = {"quant_method": "mxfp4"}
    tensors = load_file(folder / "model.safetensors")
    if how == "mxfp4":
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            exponents = torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    else:
        settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        for name in [name for name in tensors if name.endswith("proj.weight") or name.endswith("mqa.weight")]:
            rows, columns = tensors[name].shape
            scales = 0.002 + 0.002 * torch.rand(-(-rows // BLOCK), -(-columns // BLOCK))
            each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
            numbers = (tensors[name] / each).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors |= {name: numbers, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


class RankProcesses:
    """Ranks that wait for work: children of one process that has imported everything that they need."""

    def __init__(self, count: int, silence_s: float) -> None:
        """Start `count` ranks, each of which may be silent for `silence_s` before it counts as lost."""
        self._count, self._silence_s = count, silence_s
        self._spawn()

    def _spawn(self) -> None:
        ins, outs = ([os.pipe() for _ in range(self._count)] for _ in range(2))
        theirs = [(read, write) for (read, _), (_, write) in zip(ins, outs, strict=True)]
        self._said, self._logged = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until they end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.rank", str(self._silence_s)]
            + [f"{read},{write}" for read, write in theirs],
            cwd=Path(__file__).parents[2],
            pass_fds=[end for pair in theirs for end in pair],
            stdout=self._said,  # files, which are never full: a pipe that nobody reads blocks the process that logs
            stderr=self._logged,
        )
        for end in (end for pair in theirs for end in pair):
            os.close(end)
        self._lines = [os.fdopen(write, "wb") for _, write in ins]
        self._answers = [os.fdopen(read, "rb") for read, _ in outs]

    def start(self, *ranks: tuple[EngineConfig, Rendezvous | None], **work: Any) -> None:
        for file, (config, rendezvous) in zip(self._lines, ranks, strict=False):
            file.write(msgspec.json.encode({"config": config, "rendezvous": rendezvous, "waves": []} | work) + b"\n")
            file.flush()

    def work(self, *ranks: tuple[EngineConfig, Rendezvous | None], **work: Any) -> list[Any]:
        """Return each rank's answer, that of rank 0 first. If a rank ends, new processes are started for the next
        call."""
        self.start(*ranks, **work)
        lines = [file.readline() for file, _ in zip(self._answers, ranks, strict=False)]
        if not all(lines):
            logged = self.end()[1]
            self._spawn()
            raise AssertionError(f"a rank has ended; the log of all: {logged}")
        return [msgspec.convert(msgspec.json.decode(line), dict[str, Any], strict=False) for line in lines]

    def pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self._process.pid).children()]

    def end(self) -> tuple[str, str]:
        """End the processes, and return their standard output and error."""
        for line in self._lines:
            with contextlib.suppress(BrokenPipeError):
                line.close()
        self._process.wait(timeout=60)
        for answer in self._answers:
            answer.close()
        return read_all(self._said), read_all(self._logged)


def read_all(file: IO[bytes]) -> str:
    """Return what processes that have ended wrote to the file, and close it."""
    with file:
        file.seek(0)
        return file.read().decode()


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(4, silence_s=120)  # on a busy machine compiling alone can hold the interpreter for seconds
    yield started
    started.end()


def settings_of(folder: Path, **settings: Any) -> EngineConfig:
    """Return a configuration with so little KV memory that requests are preempted, unless the model has recurrent
    layers."""
    tight: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_batch_tokens": 24, "max_running": 8, "policy": "fcfs"}
    given = {"model": str(folder), "name": "tiny", "device": "cpu", "dtype": "float32"} | tight | settings
    config = EngineConfig(**given)
    spec = read_spec(folder)
    own = own_spec(spec, RankPosition(layout_of(config)))
    num_blocks = NUM_WINDOWED_BLOCKS if len(cache_groups(spec)) > 1 else NUM_BLOCKS
    attentions = [layer.attention for layer in own.layers]
    states = [part for one in attentions if isinstance(one, RecurrentSpec) for part in one.state_parts]
    state_bytes = 4 * config.max_running * sum(math.prod(part.shape) for part in states)
    kept = [one for one in attentions if not isinstance(one, RecurrentSpec)]
    cached = sum(one.cached_values + getattr(one, "index_key_width", 0) for one in kept)
    entries = sum(one.block_values(BLOCK_SIZE) for one in attentions if isinstance(one, PagedStateSpec))
    kv_bytes = 4 * num_blocks * (BLOCK_SIZE * cached // config.decode_context_parallel + entries)
    if states:  # states may take half of the memory
        kv_bytes = (4 if config.speculate is Speculate.NGRAM else 2) * state_bytes + kv_bytes
    memory = {"kv_memory_bytes": kv_bytes, "host_kv_memory_bytes": config.host_kv_memory_bytes or 0}
    return msgspec.structs.replace(config, **memory)


def ranks_of(config: EngineConfig, host: str = "127.0.0.1") -> list[tuple[EngineConfig, Rendezvous | None]]:
    """Return the configuration of each rank, with a free port for the rendezvous."""
    num_ranks = layout_of(config).num_ranks
    if num_ranks == 1:
        return [(config, None)]
    port = free_port(host)
    return [(config, Rendezvous(rank, num_ranks, host=host, port=port)) for rank in range(num_ranks)]


def requests(num_tokens: int = 6) -> list[list[CoreSubmit]]:
    """Return waves of requests for `num_tokens` each, with common prefixes, some greedy, some seeded, and one for an
    embedding. The last wave repeats a request alone."""

    def one(key: int) -> CoreSubmit:
        prompt = [3 + (i * 7 + (key % 2) * 5) % 380 for i in range(9)]
        prompt += [5 + (key * 31 + i) % 370 for i in range(4 * key)]
        sampled = Sampling(temperature=0.8, top_p=0.9, seed=key, num_logprobs=2)
        sampling = sampled if key % 3 == 2 else Sampling(temperature=0.0, num_logprobs=2)
        return CoreSubmit(key, "t", STANDARD, prompt, sampling, num_tokens, 0, [], num_tokens, b"s", 0)

    embedded = msgspec.structs.replace(one(5), key=12, embed=True, max_tokens=0, credit_tokens=0)
    again = msgspec.structs.replace(one(9), key=13)
    return [[one(key) for key in range(6)], [*(one(key + 2) for key in range(6, 10)), embedded], [again]]


def assert_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Compare token by token, until the two best logits are so close that either can win."""
    assert not theirs["error"] and not ours["error"], theirs["error"] + ours["error"]
    assert theirs["token_ids"].keys() == ours["token_ids"].keys() != set()
    for key, expected in theirs["token_ids"].items():
        for place, (wanted, found) in enumerate(zip(expected, ours["token_ids"][key], strict=True)):
            if wanted != found:
                best, second = theirs["best"][key][place]
                assert best - second < NEAR, f"request {key}, token {place}: {found} and not {wanted}"
                break
    for key, vector in theirs["vectors"].items():
        torch.testing.assert_close(torch.tensor(ours["vectors"][key]), torch.tensor(vector), rtol=0, atol=NEAR)


@dataclass(frozen=True)
class Alone:
    """Answers of a single rank, by family and settings."""

    processes: RankProcesses
    folders: dict[str, Path]
    known: dict[str, dict[str, Any]]

    def says(self, family: str, exact: bool = False, num_tokens: int = 6, **settings: Any) -> dict[str, Any]:
        name = f"{family} {exact} {num_tokens} {settings}"
        if name not in self.known:
            config = settings_of(self.folders[family], **settings)
            waves = requests(num_tokens)
            (self.known[name],) = self.processes.work(*ranks_of(config), waves=waves, exact=exact)
        return self.known[name]


@pytest.fixture(scope="session")
def alone(processes: RankProcesses, folders: dict[str, Path]) -> Alone:
    return Alone(processes, folders, {})


def thorough(*case: Any) -> Any:
    """Mark a case whose parts other cases show."""
    return pytest.param(*case, marks=pytest.mark.thorough)


def ask_ranks(processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Check that the ranks of a layout answer as one rank alone; return what the first one says."""
    ours, *others = processes.work(*ranks_of(settings_of(alone.folders[family], **layout)), waves=requests())
    assert_same(alone.says(family), ours)
    assert not any(other["error"] for other in others)
    return ours
