"""A differentiable Qwen3-MoE in plain torch, with the parameter names of Hugging Face's files.

Knows no text and no files. Sequences are processed without padding between groups: a batch is a list of groups, each a
rectangle of token ids; everything but attention runs on the concatenated rows of the rectangles.

T tokens, B sequences, S positions, D model, F expert hidden, E experts, K top-k, H heads, G key-value heads, C head
dimension, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from moiety_demo.primitives import normalize, rotate

# Wide enough that tokens are routed to different experts from the first step on.
ROUTER_INIT_STD = 0.05


@dataclass(frozen=True, slots=True)
class NetworkConfig:
    """Dimensions of the network; the defaults are the bundled model's."""

    vocab_size: int
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 16
    num_experts_per_token: int = 2
    expert_hidden_size: int = 96
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    init_std: float = 0.02


@dataclass(slots=True)
class Routing:
    """Routing of a batch by one layer's router: its probabilities and its choice."""

    probability_TE: Tensor
    expert_TK: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight, self.eps)


class DemoAttention(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        d, c = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_heads * c, bias=False)
        self.k_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.v_proj = nn.Linear(d, config.num_kv_heads * c, bias=False)
        self.o_proj = nn.Linear(config.num_heads * c, d, bias=False)
        self.q_norm = RMSNorm(c, config.rms_norm_eps)
        self.k_norm = RMSNorm(c, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, shapes: Sequence[tuple[int, int]], cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        c = self.config.head_dim
        q_THC = rotate(self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, c))), cos_TC, sin_TC)
        k_TGC = rotate(self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, c))), cos_TC, sin_TC)
        v_TGC = self.v_proj(x_TD).unflatten(-1, (-1, c))
        sizes = [num_sequences * length for num_sequences, length in shapes]
        parts = zip(*(torch.split(x, sizes) for x in (q_THC, k_TGC, v_TGC)), shapes, strict=True)
        out = torch.cat([_attend(q, k, v, shape) for q, k, v, shape in parts])
        projected: Tensor = self.o_proj(out)
        return projected


class Expert(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        d, f = config.hidden_size, config.expert_hidden_size
        self.gate_proj = nn.Linear(d, f, bias=False)
        self.up_proj = nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return out


class SparseMoe(nn.Module):
    """Softmax over all experts, with the top k renormalized; the rows of each expert are gathered and run at once."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(config) for _ in range(config.num_experts))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Routing]:
        k = self.config.num_experts_per_token
        probability_TE = self.gate(x_TD).softmax(-1)
        weight_TK, expert_TK = probability_TE.topk(k, dim=-1)
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        order_R = expert_TK.flatten().argsort(stable=True)
        token_R = order_R // k
        counts = expert_TK.flatten().bincount(minlength=self.config.num_experts).tolist()
        rows = torch.split(x_TD.index_select(0, token_R), counts)
        pairs = zip(self.experts, rows, strict=True)
        out_RD = torch.cat([expert(row) for expert, row in pairs]) * weight_TK.flatten()[order_R, None]
        out_TD = torch.zeros_like(x_TD).index_add(0, token_R, out_RD)
        return out_TD, Routing(probability_TE, expert_TK)


class Layer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DemoAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMoe(config)

    def forward(
        self, x_TD: Tensor, shapes: Sequence[tuple[int, int]], cos_TC: Tensor, sin_TC: Tensor
    ) -> tuple[Tensor, Routing]:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), shapes, cos_TC, sin_TC)
        out_TD, routing = self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD + out_TD, routing


class Decoder(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DemoNetwork(nn.Module):
    """The causal language model; input and output embeddings share one matrix."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = (2 * config.num_layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=config.init_std / depth)
        for name, parameter in self.named_parameters():
            if name.endswith("mlp.gate.weight"):
                nn.init.normal_(parameter, std=ROUTER_INIT_STD)

    def forward(self, groups: Sequence[Tensor]) -> tuple[Tensor, list[Routing]]:
        """Return hidden states [T, D] of the groups' concatenated tokens (int64 [B, S] each), and each routing."""
        shapes = [(group.shape[0], group.shape[1]) for group in groups]
        position_T = torch.cat([torch.arange(group.shape[1]).repeat(group.shape[0]) for group in groups])
        cos_TC, sin_TC = rotary_tables(position_T, self.config)
        x_TD = self.model.embed_tokens(torch.cat([group.flatten() for group in groups]))
        routings = []
        for layer in self.model.layers:
            x_TD, routing = layer(x_TD, shapes, cos_TC, sin_TC)
            routings.append(routing)
        return self.model.norm(x_TD), routings

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits [T, V] of hidden states; pass only the rows that are needed."""
        return functional.linear(hidden_TD, self.model.embed_tokens.weight)


def rotary_tables(position_T: Tensor, config: NetworkConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, C / 2] of the rotary embedding."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angle = (position_T.float()[:, None] * config.rope_theta**-exponent)[:, None]
    return angle.cos(), angle.sin()


def _attend(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int]) -> Tensor:
    """Apply causal attention within each of a rectangle's sequences: [B*S, H, C] to [B*S, H*C]."""
    q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)
