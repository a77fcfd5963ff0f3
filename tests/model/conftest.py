"""Small random checkpoints written by transformers' own classes, and a driver that steps our model by hand.

The driver allocates blocks in a scrambled order, fills the cache with NaN first and builds Batches as the runner does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_engine.config import OffloadConfig
from moiety_engine.model.batch import Batch, RecurrentRows
from moiety_engine.model.loading import load_model
from moiety_engine.model.transformer import Transformer

from .recent_variants import RECENT_VARIANTS

NUM_STATES = 8  # of a driver
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

SMALL: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [2.0, 3.0, 5.0, 9.0, 14.0, 20.0, 30.0, 48.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}

LATENT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
}

# name: (family, what its configuration says beyond SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        MIXTURE | {"head_dim": 32, "moe_intermediate_size": 48, "intermediate_size": 96, "norm_topk_prob": True},
    ),
    "qwen3_moe, dense layers, biases, yarn": (
        "qwen3_moe",
        MIXTURE
        | {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "intermediate_size": 96,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}),
    "mixtral, sliding window": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 50},
    ),
    "olmoe": ("olmoe", MIXTURE | {"intermediate_size": 48, "num_key_value_heads": 4}),
    "olmoe, clipped, linear rope": (
        "olmoe",
        MIXTURE | {"intermediate_size": 48, "clip_qkv": 0.6, "norm_topk_prob": True, "rope_parameters": LINEAR_ROPE},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        MIXTURE
        | {
            "num_hidden_layers": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "intermediate_size": 96,
        }
        | {"mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 40},
    ),
    "granitemoe": (
        "granitemoe",
        {"num_hidden_layers": 2}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48, "tie_word_embeddings": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "granite": (
        "granite",
        {"num_hidden_layers": 2, "intermediate_size": 96, "attention_bias": True, "mlp_bias": True}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "phimoe": (
        "phimoe",
        {"num_hidden_layers": 2}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48, "router_jitter_noise": 0.1}
        | {"attention_bias": True, "lm_head_bias": True, "rope_parameters": LONG_ROPE},
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"num_hidden_layers": 2}
        | {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 16}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "use_bias": False},
    ),
    "glm4_moe": (
        "glm4_moe",
        {"num_hidden_layers": 2}
        | {
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        }
        | {"moe_intermediate_size": 32, "intermediate_size": 96, "head_dim": 32, "use_qk_norm": True}
        | {"attention_bias": True, "first_k_dense_replace": 1},
    ),
    "dots1": (
        "dots1",
        {"num_hidden_layers": 2, "n_routed_experts": 16, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
        | {"moe_intermediate_size": 32, "intermediate_size": 96, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 40, "max_window_layers": 1}
        | {"head_dim": 32, "attention_bias": True},
    ),
    "qwen3_next": (
        "qwen3_next",
        MIXTURE
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "mlp_only_layers": [1]}
        | {"head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
        | {"linear_value_head_dim": 64, "norm_topk_prob": True, "initializer_range": 0.08},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        MIXTURE
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 64}
        | {"initializer_range": 0.08},
    ),
    **RECENT_VARIANTS,
    "qwen3, tied": ("qwen3", {"head_dim": 32, "intermediate_size": 96, "tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"intermediate_size": 96, "rope_parameters": LLAMA3_ROPE}),
    "gemma3": (
        "gemma3_text",
        {"num_hidden_layers": 2, "head_dim": 32, "intermediate_size": 96, "query_pre_attn_scalar": 48}
        | {"sliding_window": 40}
        | {"layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 4.0}
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": 48,
            "qk_rope_head_dim": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
        }
        | {"attention_bias": True, "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
        | {"head_dim": 32, "sliding_window": 40, "rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
    "mistral, sliding window": (
        "mistral",
        {"num_hidden_layers": 1, "intermediate_size": 96, "head_dim": 32, "sliding_window": 40},
    ),
    "qwen2, windows in the upper layers": (
        "qwen2",
        {"num_hidden_layers": 2, "intermediate_size": 96, "use_sliding_window": True}
        | {"sliding_window": 50, "max_window_layers": 1},
    ),
    "llama, biases, odd widths": (
        "llama",
        {
            "num_hidden_layers": 1,
            "hidden_size": 60,
            "intermediate_size": 90,
            "head_dim": 10,
            "vocab_size": 379,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}


QWEN2_MOE = (
    *MIXTURE,
    "num_hidden_layers",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size",
)
# families whose class is not in transformers; test_ling shows them
WITHOUT_CLASS = {"bailing_moe", "bailing_moe_v2"}
# families without a class in transformers of their own, by the family whose class it is
CLASS_OF = {"kimi_k2": "deepseek_v3"}
# classes that transformers' AutoModelForCausalLM does not know
NOT_AUTOMATIC = {"mistral4": "Mistral4ForCausalLM"}

# of use in some test only
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, as wide as blocks": (
        "deepseek_v3",
        VARIANTS["deepseek_v3"][1] | {"q_lora_rank": 64, "moe_intermediate_size": 32, "intermediate_size": 96},
    ),
    **{
        f"{name}, as wide as blocks": (VARIANTS[name][0], VARIANTS[name][1] | {"moe_intermediate_size": 64})
        for name in ("qwen3_next", "qwen3_5_moe")
    },
    **{
        f"{name}, full attention last": (
            VARIANTS[name][0],
            VARIANTS[name][1]
            | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
            | {"mlp_only_layers": []},
        )
        for name in ("qwen3_next", "qwen3_5_moe")
    },
    "deepseek_v4, as wide as blocks": (
        "deepseek_v4",
        RECENT_VARIANTS["deepseek_v4"][1] | {"q_lora_rank": 64},
    ),
    "llama, llama3 rope of long models": (
        "llama",
        {"intermediate_size": 128, "num_hidden_layers": 2}
        | {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192}},
    ),
    "qwen2, no windows": ("qwen2", {"num_hidden_layers": 2, "intermediate_size": 96}),
    "qwen2_moe, no dense layers": ("qwen2_moe", {k: v for k, v in VARIANTS["qwen2_moe"][1].items() if k in QWEN2_MOE}),
    "deepseek_v3, no biases": (
        "deepseek_v3",
        VARIANTS["deepseek_v3"][1]
        | {"attention_bias": False, "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "mimo_v2_flash, a dense last layer": (
        "mimo_v2_flash",
        RECENT_VARIANTS["mimo_v2_flash"][1]
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse", "dense"], "sliding_window": 1000, "hidden_size": 96}
        | {"intermediate_size": 96},
    ),
    "gpt_oss, experts as wide as blocks": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "head_dim": 16},
    ),
}


@dataclass
class Checkpoint:
    """A folder, and transformers' model of it in float32 as the oracle."""

    folder: Path
    oracle: Any
    vocab_size: int

    @torch.no_grad()
    def logprobs(self, token_ids: list[int]) -> Tensor:
        return self.oracle(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def write_checkpoint(
    folder: Path,
    variant: str,
    *,
    dtype: torch.dtype = torch.float32,
    variants: Mapping[str, tuple[str, dict[str, Any]]] | None = None,
) -> Checkpoint:
    """Write a random checkpoint of a variant, among VARIANTS and OTHERS if no other ones are given."""
    import transformers
    from transformers import AutoConfig

    family, more = (variants or VARIANTS | OTHERS)[variant]
    torch.manual_seed(sum(map(ord, variant)))
    config = AutoConfig.for_model(CLASS_OF.get(family, family), **(SMALL | more))
    model_class: Any = getattr(transformers, NOT_AUTOMATIC.get(family, "AutoModelForCausalLM"))
    made = model_class._from_config if family in NOT_AUTOMATIC else model_class.from_config
    oracle = made(config, attn_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in itertools.chain(oracle.named_parameters(), oracle.named_buffers()):
            if name.endswith("tid2eid"):  # the experts of each token, all of them distinct
                experts = torch.rand(len(parameter), config.n_routed_experts).argsort(dim=1)
                parameter.copy_(experts[:, : parameter.shape[1]])
            elif "norm" in name and ".fc" not in name:  # nor the gate of a norm
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith(("layer_scalar", "router.scale", "expert_scale")):
                parameter.uniform_(0.5, 1.5)
            elif "conv1d" in name:
                parameter.normal_(std=0.5)  # as initialized, what it lets through is nearly nothing, and inexact
            elif name.endswith("A_log"):
                parameter.uniform_(-3, 0)  # as initialized, a state is forgotten at once
            elif not parameter.any():  # routers and sinks that start at zero
                parameter.normal_(std=0.15)
    oracle.save_pretrained(folder)
    if family in CLASS_OF:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": family}))
    if dtype is not torch.float32:  # read anew, for rotary frequencies were narrowed with the weights
        oracle = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return Checkpoint(folder, oracle, config.vocab_size)


@pytest.fixture(scope="session", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass
class Sequence:
    """Tokens, how many of them are in the cache, and the blocks that hold them."""

    token_ids: list[int]
    num_stored: int = 0
    blocks: list[int] = field(default_factory=list)
    state_slot: int = -1  # of a model with recurrent layers


class Driver:
    """Steps a model over sequences, as the engine's runner would."""

    def __init__(self, model: Transformer, *, num_blocks: int = 160, block_size: int = 16) -> None:
        self.model, self.block_size = model, block_size
        self.kv = model.allocate_kv(num_blocks, block_size, NUM_STATES if model.spec.recurrent_layers else 0)
        for layer in (*self.kv.layers, *self.kv.states):
            for part in layer.parts:
                part.fill_(float("nan") if part.is_floating_point() else 127)
        generator = torch.Generator().manual_seed(0)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()
        self.free_states = torch.randperm(NUM_STATES, generator=generator).tolist()

    def share_prefix(self, owner: Sequence, token_ids: list[int]) -> Sequence:
        """A sequence that reuses the owner's whole blocks as far as the tokens agree."""
        pairs = zip(owner.token_ids, token_ids, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        whole = min(same, owner.num_stored, len(token_ids) - 1) // self.block_size
        return Sequence(list(token_ids), whole * self.block_size, owner.blocks[:whole])

    def step(self, chunks: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Run the next n tokens of each sequence in one batch; all their logits, sequence by sequence."""
        order = sorted(range(len(chunks)), key=lambda i: chunks[i][1] != 1)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, begins = [0], []
        for index in order:
            sequence, n = chunks[index]
            begins.append(not sequence.num_stored)
            if self.kv.num_state_slots and sequence.state_slot < 0:
                sequence.state_slot = self.free_states.pop()
            end = sequence.num_stored + n
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            ids += sequence.token_ids[sequence.num_stored : end]
            for position in range(sequence.num_stored, end):
                positions.append(position)
                block = sequence.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            sequence.num_stored = end
            starts.append(len(ids))
        ordered = [chunks[i][0] for i in order]
        widest = max(len(sequence.blocks) for sequence in ordered)
        table = [sequence.blocks + [0] * (widest - len(sequence.blocks)) for sequence in ordered]
        device = self.model.device
        logits = self.model.forward(
            Batch(
                token_ids_T=torch.tensor(ids, device=device),
                positions_T=torch.tensor(positions, device=device),
                slots_T=torch.tensor(slots, device=device),
                query_start_S1=torch.tensor(starts, dtype=torch.int32, device=device),
                context_len_S=torch.tensor([s.num_stored for s in ordered], dtype=torch.int32, device=device),
                block_table_SB=torch.tensor(table, dtype=torch.int32, device=device),
                wanted_rows_L=torch.arange(len(ids), device=device),
                num_decode=sum(1 for _, n in chunks if n == 1),
                max_context=max(s.num_stored for s in ordered),
                max_query=max(n for _, n in chunks),
                states=self._states(starts, ordered, begins) if self.kv.num_state_slots else None,
            ),
            self.kv,
        ).cpu()
        parts = logits.split([end - start for start, end in itertools.pairwise(starts)])
        results: list[Tensor] = [logits] * len(chunks)
        for index, part in zip(order, parts, strict=True):
            results[index] = part
        return results

    def _states(self, starts: list[int], sequences: list[Sequence], begins: list[bool]) -> RecurrentRows:
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        device = self.model.device
        return RecurrentRows(
            run_start_R1=torch.tensor(starts, dtype=torch.int32, device=device),
            slots_R=torch.tensor([one.state_slot for one in sequences], device=device),
            has_state_R=torch.tensor([not one for one in begins], dtype=torch.int32, device=device),
            num_single=lengths.count(1),
            max_run=max(lengths),
        )

    def prefill(self, sequence: Sequence, chunk: int) -> Tensor:
        """Run what is not yet stored, `chunk` tokens at a time; logits of all those tokens."""
        logits = []
        while (left := len(sequence.token_ids) - sequence.num_stored) > 0:
            logits += self.step([(sequence, min(chunk, left))])
        return torch.cat(logits)


@pytest.fixture
def make_driver() -> Any:
    def make(
        folder: Path,
        device: str = "cpu",
        dtype: str = "float32",
        quantization: str = "auto",
        moe_kernel: str = "auto",
        batch_invariant: bool = False,
        offload: OffloadConfig | None = None,
        **sizes: int,
    ) -> Driver:
        model = load_model(
            folder,
            device=device,
            dtype=dtype,
            quantization=quantization,
            moe_kernel=moe_kernel,
            batch_invariant=batch_invariant,
            offload=offload or OffloadConfig(),
        )
        return Driver(model, **sizes)

    return make


@pytest.fixture
def make_sequence() -> Any:
    return Sequence


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Any:
    def make(variant: str, **options: Any) -> Checkpoint:
        return write_checkpoint(tmp_path, variant, **options)

    return make
