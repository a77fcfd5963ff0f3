"""Over several ranks, real processes on gloo, a model says what it says on one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import free_port, wait_for

from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.distribution.layout import Seat, layout_of
from moiety_engine.distribution.rank_heartbeat import LOST_RANK
from moiety_engine.distribution.rendezvous_address import Rendezvous
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.families import read_spec
from moiety_engine.model.recurrent_specs import RecurrentSpec
from moiety_engine.model.spec import MoeSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.weight_offload import weight_bytes
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
    "qwen3_next": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 64}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"shared_expert_intermediate_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 64},
    "granitemoehybrid": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    | {"shared_intermediate_size": 64, "mamba_n_heads": 2, "mamba_n_groups": 2, "mamba_d_state": 32},
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
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 16}
    | {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
}
BLOCK = 32  # rows and columns that share a scale
NARROW: dict[str, tuple[str, dict[str, Any]]] = {  # checkpoints in few bits: their families, and what they must be
    "float8 blocks": ("deepseek_v3", {"q_lora_rank": 64, "intermediate_size": 128}),
    "float8 blocks, grouped heads": ("qwen3_moe", {}),
    "mxfp4": ("gpt_oss", {}),
    "int8": ("qwen3_moe", {}),
    "int4": ("mixtral", {}),
}
NEAR = 1e-4  # between the two best logits: which one wins may hang on the order of a sum
BLOCK_SIZE, NUM_BLOCKS = 4, 20  # the longest request takes 16 of them at most
NUM_WINDOWED_BLOCKS = 15  # so much memory, where blocks behind windows are freed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random checkpoint of each family, and those in few bits."""
    folders = {family: write_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}
    for name, (family, more) in NARROW.items():
        folder = write_checkpoint(tmp_path_factory.mktemp("wide"), family, **more)
        if name in FORMATS:
            folders[name] = tmp_path_factory.mktemp("narrow") / name
            write_quantized(folder, folders[name], FORMATS[name], lambda *_: None)
        else:
            folders[name] = put_in_few_bits(folder, name)
    return folders


def write_checkpoint(folder: Path, family: str, **more: Any) -> Path:
    """DeepSeek's routes all tokens to the first two experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(family))
    config = AutoConfig.for_model(family.partition(",")[0], **(SMALL | FAMILIES[family] | more))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.tensor([50.0, 50, 0, 0, 0, 0, 0, 0]))
            elif name.endswith(("bias", "sinks")):
                value.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def put_in_few_bits(folder: Path, how: str) -> Path:
    """The matrices of layers in float8 by blocks, or experts in mxfp4, drawn at random."""
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
    """Ranks that wait for work, children of one process that has imported all they need."""

    def __init__(self, count: int, silence_s: float) -> None:
        """They may say nothing for so long before they are taken for lost."""
        self._count, self._silence_s = count, silence_s
        self._spawn()

    def _spawn(self) -> None:
        ins, outs = ([os.pipe() for _ in range(self._count)] for _ in range(2))
        theirs = [(read, write) for (read, _), (_, write) in zip(ins, outs, strict=True)]
        self._said, self._logged = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until they end
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rank.py")), str(self._silence_s)]
            + [f"{read},{write}" for read, write in theirs],
            pass_fds=[end for pair in theirs for end in pair],
            stdout=self._said,  # files, which are never full: a pipe that nobody reads holds up who logs into it
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
        """Each rank's answer, the first one being rank 0's. Where one ends, the next work has new processes."""
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
        """What the processes ended with, and what they said."""
        for line in self._lines:
            with contextlib.suppress(BrokenPipeError):
                line.close()
        self._process.wait(timeout=60)
        for answer in self._answers:
            answer.close()
        return read_all(self._said), read_all(self._logged)


def read_all(file: IO[bytes]) -> str:
    """What processes have written that have ended; the file is closed."""
    with file:
        file.seek(0)
        return file.read().decode()


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    started = RankProcesses(4, silence_s=120)  # on a busy machine compiling alone can hold the interpreter for seconds
    yield started
    started.end()


def settings_of(folder: Path, **settings: Any) -> EngineConfig:
    """So little memory that requests are preempted, unless the model has recurrent layers."""
    tight: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_batch_tokens": 24, "max_running": 8, "policy": "fcfs"}
    given = {"model": str(folder), "name": "tiny", "device": "cpu", "dtype": "float32"} | tight | settings
    config = EngineConfig(**given)
    spec = read_spec(folder)
    own = own_spec(spec, Seat(layout_of(config)))
    num_blocks = NUM_WINDOWED_BLOCKS if len(cache_groups(spec)) > 1 else NUM_BLOCKS
    attentions = [layer.attention for layer in own.layers]
    states = [part for one in attentions if isinstance(one, RecurrentSpec) for part in one.state_parts]
    state_bytes = 4 * config.max_running * sum(math.prod(part.shape) for part in states)
    kept = [one for one in attentions if not isinstance(one, RecurrentSpec)]
    cached = sum(one.cached_values + getattr(one, "index_key_width", 0) for one in kept)
    kv_bytes = 4 * num_blocks * BLOCK_SIZE * cached
    if states:  # they may take half of the memory
        kv_bytes = (4 if config.speculate is Speculate.NGRAM else 2) * state_bytes + kv_bytes
    memory = {"kv_memory_bytes": kv_bytes, "host_kv_memory_bytes": config.host_kv_memory_bytes or 0}
    return msgspec.structs.replace(config, **memory)


def ranks_of(config: EngineConfig, host: str = "127.0.0.1") -> list[tuple[EngineConfig, Rendezvous | None]]:
    """The configuration for each rank, with a place to meet that is free."""
    num_ranks = layout_of(config).num_ranks
    if num_ranks == 1:
        return [(config, None)]
    port = free_port(host)
    return [(config, Rendezvous(rank, num_ranks, host=host, port=port)) for rank in range(num_ranks)]


def requests(num_tokens: int = 6) -> list[list[CoreSubmit]]:
    """Waves of requests for so many tokens, with common beginnings, some greedy and some with a seed, one for a vector;
    at the end one that comes again, alone."""

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
    """Token by token, until two logits are so near each other that either may win."""
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
    """What one rank says, by family and settings."""

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


@pytest.fixture(scope="module")
def alone(processes: RankProcesses, folders: dict[str, Path]) -> Alone:
    return Alone(processes, folders, {})


def thorough(*case: Any) -> Any:
    """A case of which each part is shown by others."""
    return pytest.param(*case, marks=pytest.mark.thorough)


CUT_BY = {  # layouts, and the family that shows each of them
    ("tp", 2): "deepseek_v3",
    ("tp", 2, "ep", 2): "qwen3_next",
    ("tp", 4, "ep", 4): "gpt_oss",
    ("pp", 2): "qwen3_moe",
}
RECURRENT = ("qwen3_next", "granitemoehybrid", "kimi_linear", "nemotron_h", "nemotron_h, latent")
REFUSED = {(family, ("tp", 4, "ep", 4)) for family in RECURRENT}  # they have two heads
CUT = [
    (pytest.param if family == shown_by else thorough)(family, dict(zip(cuts[::2], cuts[1::2], strict=True)))
    for cuts, shown_by in CUT_BY.items()
    for family in FAMILIES
    if (family, cuts) not in REFUSED
]


@pytest.mark.parametrize(("family", "layout"), CUT, ids=str)
def test_tensor_and_expert_parallel_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, int]
) -> None:
    expected = alone.says(family)
    ours, *others = processes.work(*ranks_of(settings_of(alone.folders[family], **layout)), waves=requests())
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    assert expected["num_cached"] > 0 and ours["num_cached"] > 0
    assert family in RECURRENT or (expected["num_recomputed"] > 0 and ours["num_recomputed"] > 0)
    num_ranks = len(others) + 1
    # A first stage has the vocabulary, and a layer more; an indexer is whole on each rank.
    shares = 1.45 if "pp" in layout or family == "deepseek_v32" else num_ranks / 1.1
    assert ours["weight_bytes"] <= expected["weight_bytes"] / shares


NARROW_LAYOUTS = [
    thorough("float8 blocks", {"tp": 2}),
    ("float8 blocks", {"tp": 4, "ep": 2}),
    thorough("float8 blocks, grouped heads", {"tp": 2, "ep": 2}),
    ("float8 blocks, grouped heads", {"dp_attention": 2, "ep": 2}),
    thorough("mxfp4", {"tp": 2}),
    ("mxfp4", {"dp_attention": 2, "tp": 2, "ep": 2}),
    thorough("int8", {"tp": 2}),
    ("int4", {"tp": 2, "ep": 2}),
]


@pytest.mark.parametrize(("name", "layout"), NARROW_LAYOUTS, ids=str)
def test_parallel_ranks_of_a_checkpoint_in_few_bits_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, name: str, layout: dict[str, int]
) -> None:
    expected = alone.says(name, exact=True, dtype="bfloat16")
    config = settings_of(alone.folders[name], dtype="bfloat16", **layout)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), exact=True)
    assert_same(expected, ours)
    assert not any(other["error"] for other in others)
    assert expected["weight_bytes"] < 0.8 * weight_bytes(read_spec(alone.folders[name]), torch.bfloat16)
    assert "dp_attention" in layout or ours["weight_bytes"] <= 1.1 * expected["weight_bytes"] / (len(others) + 1)


def share_of(config: EngineConfig) -> float:
    """The bytes that the first rank has of a model: attention and what every token needs once in each group of ranks,
    each expert once, if experts have no ranks of their own."""
    sizes = {"experts": 0, "rest": 0}
    with safe_open(Path(config.model) / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            one = file.get_slice(name)
            sizes["experts" if ".experts." in name else "rest"] += 4 * math.prod(one.get_shape())
    layout = layout_of(config)
    return sizes["rest"] / layout.tp + (0 if layout.ffn_ranks else sizes["experts"] / layout.stage_size)


IN_GROUPS = [
    ("qwen3_moe", {"dp_attention": 2, "ep": 2}),
    *(thorough(one, {"dp_attention": 2, "ep": 2}) for one in ("deepseek_v3", "deepseek_v32", "mixtral", "gpt_oss")),
    thorough("qwen3_moe", {"dp_attention": 2, "tp": 2, "ep": 4}),
    ("deepseek_v3", {"dp_attention": 2, "tp": 2, "ep": 4}),
    ("gpt_oss", {"dp_attention": 2, "tp": 2, "ep": 2}),
    thorough("qwen3_moe", {"dp_attention": 2, "ep": 2, "pp": 2}),
    ("nemotron_h, latent", {"dp_attention": 2, "ep": 2}),
]
APART = [
    ("gpt_oss", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2}),
    *(
        thorough(family, {"dp_attention": 2, "ffn_ranks": 2, "ep": 2})
        for family in ("deepseek_v3", "deepseek_v32", "qwen3_moe", "mixtral")
    ),
    ("deepseek_v3", {"tp": 2, "ffn_ranks": 2, "ep": 2}),
    *(thorough(family, {"tp": 2, "ffn_ranks": 2, "ep": 2}) for family in ("qwen3_moe", "mixtral", "gpt_oss")),
    ("qwen3_moe", {"pp": 2, "ffn_ranks": 2}),
    thorough("qwen3_next", {"pp": 2, "ffn_ranks": 2}),
    thorough("nemotron_h", {"pp": 2, "ffn_ranks": 2}),
]


@pytest.mark.parametrize(("family", "layout"), IN_GROUPS + APART, ids=str)
def test_parallel_groups_with_sequences_of_their_own_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, int]
) -> None:
    config = settings_of(alone.folders[family], **layout, micro_batch_tokens=2)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), counts=True)
    assert_same(alone.says(family), ours)  # in the last wave all groups but one have no tokens
    assert not any(other["error"] for other in others)
    assert ours["num_cached"] > 0
    assert "pp" in layout or family in ("gpt_oss", *RECURRENT) or ours["num_recomputed"] > 0
    assert "pp" in layout or ours["weight_bytes"] <= 1.1 * share_of(config)
    spec = read_spec(alone.folders[family])
    top_k = sum(layer.ffn.routing.top_k for layer in spec.layers if isinstance(layer.ffn, MoeSpec))
    assert ours["num_picks"] == ours["num_computed"] * top_k > 0


@pytest.mark.parametrize("micro_batches", [thorough(2), 3])
def test_parallel_ranks_with_attention_send_the_next_micro_batch_while_experts_have_one(
    processes: RankProcesses, alone: Alone, tmp_path: Path, micro_batches: int
) -> None:
    apart = {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batches": micro_batches, "micro_batch_tokens": 2}
    config = settings_of(alone.folders["mixtral"], **apart)
    ours, *others = processes.work(*ranks_of(config), waves=requests()[:1], turns=str(tmp_path))
    expected = alone.says("mixtral")
    first = {name: {key: expected[name][key] for key in ours["token_ids"]} for name in ("token_ids", "best")}
    assert_same(expected | first | {"vectors": {}}, ours)
    assert [other["error"] for other in others] == [""] * 3
    assert min(other["num_waited"] for other in others[1:]) > 20
    assert min(ours["waited_s"]) > 0


@pytest.mark.parametrize("layout", [thorough({"tp": 4, "ep": 2}), {"tp": 2, "ep": 2, "pp": 2}], ids=str)
def test_each_kind_of_parallel_goes_with_the_others(
    processes: RankProcesses, alone: Alone, layout: dict[str, int]
) -> None:
    ours, *_ = processes.work(*ranks_of(settings_of(alone.folders["qwen3_moe"], **layout)), waves=requests())
    assert_same(alone.says("qwen3_moe"), ours)


IN_TWO = [{"tp": 2, "ep": 2}, {"dp_attention": 2, "ep": 2, "speculate": "ngram"}, {"ffn_ranks": 1}]


@pytest.mark.parametrize("layout", IN_TWO, ids=str)
def test_parallel_steps_that_overlap_swap_and_sleep_say_the_same(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any]
) -> None:
    more = {"overlap": "on", "host_kv_memory_bytes": 1 << 20}
    config = settings_of(alone.folders["qwen3_moe"], **layout, **more)
    ours, _ = processes.work(*ranks_of(config), waves=requests(num_tokens=10), naps=True)
    assert_same(alone.says("qwen3_moe", num_tokens=10), ours)
    assert ours["num_swapped"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_attention": 2, "ep": 2}, {"pp": 2}, {"ffn_ranks": 1}], ids=str)
def test_parallel_ranks_undo_drafts_over_recurrent_layers_alike(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any]
) -> None:
    few_words = dict.fromkeys((17, 230, 41), 30.0)  # so that some drafts are right
    waves = [
        [
            msgspec.structs.replace(
                one,
                prompt_ids=[*one.prompt_ids, *[17, 230, 41] * 4],
                sampling=Sampling(temperature=0.0, logit_bias=few_words),
            )
            for one in wave
            if not one.embed
        ]
        for wave in requests(num_tokens=30)
    ]
    folder = alone.folders["qwen3_next"]
    plain = settings_of(folder, speculate=Speculate.NGRAM)
    (expected,) = processes.work(*ranks_of(msgspec.structs.replace(plain, speculate=Speculate.OFF)), waves=waves)
    ours, *_ = processes.work(*ranks_of(settings_of(folder, speculate=Speculate.NGRAM, **layout)), waves=waves)
    assert ours["token_ids"] == expected["token_ids"]
    assert ours["num_accepted"] > 0


SHUFFLED = [
    thorough("deepseek_v3", {"tp": 4, "ep": 4, "redundant_experts": 4}),
    ("gpt_oss", {"tp": 4, "ep": 2, "rebalance_every_s": 1e9}),  # pieces of experts, with biases
    ("qwen3_moe", {"dp_attention": 4, "ep": 4, "redundant_experts": 8, "overlap": "on", "quantization": "none"}),
    thorough("qwen3_moe", {"tp": 2, "ep": 2, "pp": 2, "redundant_experts": 2}),
    ("mixtral", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "redundant_experts": 2, "micro_batch_tokens": 2}),
]


@pytest.mark.parametrize(("family", "layout"), SHUFFLED, ids=str)
def test_parallel_ranks_whose_experts_keep_moving_say_what_one_rank_says(
    processes: RankProcesses, alone: Alone, family: str, layout: dict[str, Any]
) -> None:
    config = settings_of(alone.folders[family], **layout)
    ours, *others = processes.work(*ranks_of(config), waves=requests(), shuffles=True)
    assert_same(alone.says(family), ours)
    assert not any(other["error"] for other in others)
    assert ours["moves"]["rebalances"] >= 10
    assert ours["moves"]["bytes"] > 10 * ours["weight_bytes"]


SHARING = [
    {"tp": 4, "ep": 4},
    thorough({"dp_attention": 4, "ep": 4}),
    thorough({"tp": 2, "ep": 2, "pp": 2}),
    {"ffn_ranks": 2, "ep": 2},
]


@pytest.mark.parametrize("layout", SHARING, ids=str)
def test_parallel_ranks_share_the_experts_that_all_tokens_go_to(
    processes: RankProcesses, alone: Alone, layout: dict[str, Any]
) -> None:
    settings = layout | {"redundant_experts": layout["ep"], "rebalance_every_s": 1.0}
    config = settings_of(alone.folders["deepseek_v3"], **settings)
    ours, *_ = processes.work(*ranks_of(config), waves=requests(), hurries=0.05)
    assert_same(alone.says("deepseek_v3"), ours)
    assert ours["moves"]["rebalances"] >= 1
    assert ours["moves"]["planned"] == 1.0  # each rank has one of the two experts


@pytest.mark.parametrize("lacks", [thorough("host"), "device", thorough("cache")])
def test_parallel_ranks_of_which_one_has_no_room_to_sleep_or_wake_go_on_together(
    processes: RankProcesses, alone: Alone, lacks: str
) -> None:
    config = settings_of(alone.folders["qwen3_moe"], tp=2, ep=2, host_kv_memory_bytes=1 << 20)
    ours, other = processes.work(*ranks_of(config), waves=requests(), naps=True, lacks=lacks)
    assert_same(alone.says("qwen3_moe"), ours)
    assert not other["error"]
    first, *_ = ours["refusals"]
    assert ("does not fit" if lacks == "cache" else "another rank") in first


def test_parallel_ranks_in_few_bits_say_nearly_the_same(processes: RankProcesses, alone: Alone) -> None:
    config = settings_of(alone.folders["qwen3_moe"], tp=2, ep=2, quantization="int8")
    ours, other = processes.work(*ranks_of(config), waves=requests())
    assert not ours["error"] and not other["error"]
    expected = alone.says("qwen3_moe", quantization="int8")
    first = [tokens[0] == ours["token_ids"][key][0] for key, tokens in expected["token_ids"].items() if tokens]
    assert sum(first) >= 0.7 * len(first)
    assert ours["weight_bytes"] < 0.6 * expected["weight_bytes"]


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("mixtral", {}, "checkpoint of rank 1 differs"),
        ("qwen3_moe", {"max_running": 7}, "max_running is 7 there and 8"),
    ],
)
def test_parallel_ranks_that_do_not_belong_together_all_say_so(
    processes: RankProcesses, folders: dict[str, Path], family: str, settings: dict[str, Any], words: str
) -> None:
    first, (_, rendezvous) = ranks_of(settings_of(folders["qwen3_moe"], tp=2))
    other = settings_of(folders[family], tp=2, **settings)
    if family == "mixtral":
        other = msgspec.structs.replace(other, kv_memory_bytes=first[0].kv_memory_bytes)
    for answer in processes.work(first, (other, rendezvous)):
        assert words in answer["error"]


def test_a_parallel_rank_that_does_not_come_is_named(processes: RankProcesses, folders: dict[str, Path]) -> None:
    first, second, third, _ = ranks_of(settings_of(folders["qwen3_moe"], tp=4, join_timeout_s=3))
    for answer in processes.work(first, second, third):
        assert "(--join-timeout-s): 3" in answer["error"]


MASKED = [  # who stays away, and how many are done without
    ("qwen3_moe", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batch_tokens": 2}, {3}, 1),
    thorough("gpt_oss", {"ffn_ranks": 2}, {2}, 1),  # the last rank with experts
    thorough("gpt_oss", {"dp_attention": 4, "ep": 2}, {3}, 1),  # pieces of experts become whole ones
    thorough("mixtral", {"tp": 2, "ffn_ranks": 2, "ep": 2, "redundant_experts": 2}, {2}, 1),
    thorough("deepseek_v3", {"dp_attention": 4, "ep": 4}, {2}, 1),
    ("qwen3_moe", {"dp_attention": 4, "ep": 4, "redundant_experts": 8}, {1, 3}, 2),  # experts keep moving
    ("qwen3_moe", {"dp_attention": 2, "tp": 2, "ep": 4}, {3}, 2),  # rank 2 has half of the heads of nobody's requests
    thorough("mixtral", {"dp_attention": 2, "ep": 2}, {1}, 1),  # one is left
]


@pytest.mark.parametrize(("family", "layout", "away", "num_masked"), MASKED, ids=str)
def test_parallel_ranks_without_those_that_do_not_come_say_what_one_rank_says(
    processes: RankProcesses,
    alone: Alone,
    family: str,
    layout: dict[str, Any],
    away: set[int],
    num_masked: int,
) -> None:
    config = settings_of(alone.folders[family], **layout, exclude_rank_after_s=5)
    coming = [one for rank, one in enumerate(ranks_of(config)) if rank not in away]
    moves = layout.get("redundant_experts") == 8
    ours, *others = processes.work(*coming, waves=requests(), shuffles=moves)
    assert_same(alone.says(family), ours)
    assert ours["num_masked"] == num_masked
    assert not moves or ours["moves"]["rebalances"] >= 10
    dismissed = [other["error"] for other in others if other["error"]]
    assert len(dismissed) == num_masked - len(away)
    assert all("another rank that shares heads with it did not join" in error for error in dismissed)


def test_parallel_ranks_that_have_no_room_for_the_parts_of_one_that_is_gone_say_without_whom(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path
) -> None:
    losses = tmp_path / "losses"
    config = settings_of(folders["qwen3_moe"], ffn_ranks=2, ep=2, exclude_rank_after_s=5, rank_failure_log=str(losses))
    first, second, _ = ranks_of(config)
    for answer in processes.work(first, second, lacks="weights"):
        assert "has 0.00 GiB free" in answer["error"]
        assert answer["error"].count("(the group runs without rank 2 and holds its part of the model)") == 1
    assert [line.split()[1] for line in losses.read_text().splitlines()[1:]] == ["1"]  # it says that it cannot go on


@pytest.mark.parametrize(
    ("layout", "away", "words"),
    [
        ({"tp": 2, "dp_attention": 2}, {1}, "rank 0 needs rank 1, which holds the other heads"),
        ({"pp": 2, "ffn_ranks": 2}, {1}, "rank 1 is the only one with its layers"),
        ({"tp": 2, "ffn_ranks": 2}, {2, 3}, "no rank with experts is left"),
    ],
    ids=str,
)
def test_a_parallel_rank_that_cannot_be_done_without_is_waited_for_and_then_named(
    processes: RankProcesses, folders: dict[str, Path], layout: dict[str, int], away: set[int], words: str
) -> None:
    config = msgspec.structs.replace(
        settings_of(folders["qwen3_moe"]), **layout, join_timeout_s=3, exclude_rank_after_s=1
    )
    coming = [one for rank, one in enumerate(ranks_of(config)) if rank not in away]
    for answer in processes.work(*coming):
        assert f"(--join-timeout-s): {', '.join(map(str, sorted(away)))}" in answer["error"]
        assert f"The other ranks cannot start without them: {words}" in answer["error"]


def test_a_parallel_launch_of_another_number_of_ranks_is_refused(
    processes: RankProcesses, folders: dict[str, Path]
) -> None:
    ranks = ranks_of(settings_of(folders["qwen3_moe"], dp_attention=2, ep=2))
    started = [(config, replace(rendezvous, num_ranks=3)) for config, rendezvous in ranks if rendezvous is not None]
    for answer in processes.work(*started):
        assert "--dp-attention 2 × --tp 1 needs 2 ranks, but 3 were started" in answer["error"]


def test_the_other_rank_reports_why_the_first_parallel_rank_failed(folders: dict[str, Path]) -> None:
    pair = RankProcesses(2, silence_s=120)
    _, second = wait_for(lambda: len(pair.pids()) == 2 and pair.pids(), "both ranks")
    pair.start(*ranks_of(settings_of(folders["qwen3_moe"], tp=2)), waves=requests()[:1], fails="no luck")
    ended, logged = pair.end()
    assert f"{second} {LOST_RANK}" in ended
    assert "the first rank cannot continue: no luck" in logged


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.thorough
def test_a_parallel_group_that_has_lost_a_rank_for_good_says_the_same_without_it(alone: Alone, tmp_path: Path) -> None:
    layout = {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "exclude_rank_after_s": 20, "micro_batch_tokens": 2}
    losses = tmp_path / "losses"
    layout |= {"rank_failure_log": str(losses), "exclude_rank_after_failures": 2}
    config = settings_of(alone.folders["qwen3_moe"], **layout)
    whole = RankProcesses(4, silence_s=120)
    whole.start(*ranks_of(config), waves=requests()[:1], again=True, served=str(tmp_path / "served"))
    wait_for((tmp_path / "served").exists, "steps that run")
    *living, dead = whole.pids()
    os.kill(dead, signal.SIGKILL)
    wait_for(lambda: all(map(has_ended, living)), "the end of the other ranks")
    assert "rank 3 is lost" in whole.end()[1]
    head, *lines = losses.read_text().splitlines()
    assert head.startswith("lost ranks of ") and [line.split()[1] for line in lines] == ["3"]
    left = RankProcesses(4, silence_s=120)
    first, second, third, _ = ranks_of(config)
    ours, *others = left.work(first, second, third, waves=requests())
    assert_same(alone.says("qwen3_moe"), ours)
    assert ours["num_masked"] == 1 and not any(other["error"] for other in others)
    back = left.work(*ranks_of(config), waves=requests())  # it takes part again, since it has come in time
    assert_same(alone.says("qwen3_moe"), back[0])
    assert back[0]["num_masked"] == 0 and not any(other["error"] for other in back)
    losses.write_text(losses.read_text() * 2)
    again, *_, refused = left.work(*ranks_of(config), waves=requests())  # it comes, but was lost too often
    assert_same(alone.says("qwen3_moe"), again)
    assert again["num_masked"] == 1
    assert any(one in refused["error"] for one in ("rank 3 failed 2 times in 600 s", "rank 3 joined after the others"))
    assert '"event": "ranks_excluded"' in left.end()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "layout"), [(signal.SIGKILL, {"ffn_ranks": 1}), thorough(signal.SIGSTOP, {"tp": 2})]
)
def test_a_lost_parallel_rank_ends_the_group(
    folders: dict[str, Path], tmp_path: Path, number: int, layout: dict[str, int]
) -> None:
    pair = RankProcesses(2, silence_s=10 if number == signal.SIGSTOP else 120)
    config = settings_of(folders["qwen3_moe"], **layout)
    pair.start(*ranks_of(config), waves=requests()[:1], again=True, served=str(tmp_path / "served"))
    wait_for((tmp_path / "served").exists, "steps that run")
    first, second = pair.pids()
    os.kill(second, number)
    wait_for(lambda: has_ended(first), "the end of the other rank")
    with contextlib.suppress(ProcessLookupError):
        os.kill(second, signal.SIGKILL)
    ended, logged = pair.end()
    assert f"{first} {LOST_RANK}" in ended
    assert "rank_lost" in logged
    assert ("sent no heartbeat" if number == signal.SIGSTOP else "is lost") in logged


@pytest.mark.parametrize(
    "layout", [thorough({"tp": 2}), thorough({"pp": 2}), {"dp_attention": 2, "ep": 2}, {"ffn_ranks": 1}]
)
def test_a_request_that_is_not_finite_fails_alone_on_every_layout(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path, layout: dict[str, int]
) -> None:
    folder = tmp_path / "poisoned"
    shutil.copytree(folders["mixtral"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][384] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    good = requests()[0]
    bad = [msgspec.structs.replace(good[key], key=20 + key, prompt_ids=[*good[key].prompt_ids, 384]) for key in (1, 3)]
    (alone,) = processes.work(*ranks_of(settings_of(folder)), waves=[good], some_fail=True, exact=True)
    config = settings_of(folder, **layout)
    found = processes.work(*ranks_of(config), waves=[[*good, *bad]], some_fail=True, exact=True)[0]
    assert found["failed"] == dict.fromkeys(("21", "23"), "non_finite_output")
    said = {key: tokens for key, tokens in found["token_ids"].items() if key not in found["failed"]}
    assert said == alone["token_ids"]
    assert [found["token_ids"][key] for key in found["failed"]] == [[], []]
