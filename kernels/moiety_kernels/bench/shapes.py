"""The measured layers as data: those of models in common use, and small ones for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import typer


@dataclass(frozen=True, slots=True)
class SparseShape:
    """Sparse latent attention: index queries, rows of the cache, and the rows that a token selects."""

    index_heads: int
    index_width: int
    heads: int
    row_width: int
    value_width: int
    top_k: int


@dataclass(frozen=True, slots=True)
class RecurrenceShape:
    """A recurrent layer's heads: key heads and value heads with their widths, and decays per token and value head."""

    heads: int
    value_heads: int
    width: int
    value_width: int
    gates: int = 1

    @property
    def state_entries(self) -> int:
        """Entries of the state of one sequence."""
        return self.value_heads * self.width * self.value_width


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer of a model, without biases and with SiLU as its activation.

    Heads are those of its attention; `vocabulary` is the output width of its last layer.
    """

    name: str
    num_experts: int
    top_k: int
    width: int
    hidden: int  # of one expert
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    routing: Mapping[str, Any] = field(default_factory=lambda: {"renormalize": True})  # further fields of RoutingSpec
    dtype: str = "bfloat16"  # of the weights
    recurrences: Mapping[str, RecurrenceShape] = field(default_factory=dict)  # by kind, of RECURRENCES
    sparse: SparseShape | None = None


DELTA_RULES = ("gated_delta", "kimi_delta")
RECURRENCES = (*DELTA_RULES, "mamba2", "lightning_attention")
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
ROUTINGS = ("uniform", "zipf")
DECODE_CONTEXT = 4096  # cached tokens of every decoding sequence
SPARSE_CONTEXT = 32768  # the same with sparse attention; a 64th of it on a CPU

_SIGMOID = {"scoring": "sigmoid", "renormalize": True}
_GROUPS = {"num_groups": 8, "top_groups": 4, "group_score": "best_two", "scale": 2.5}
_CHOSEN = {"scoring": "softmax_chosen", "renormalize": False}
MODELS = (
    LayerShape("Mixtral-8x7B", 8, 2, 4096, 14336, 32, 8, 128, 32000),
    LayerShape("OLMoE", 64, 8, 2048, 1024, 16, 16, 128, 50304, {"renormalize": False}),
    LayerShape("Qwen3-30B-A3B", 128, 8, 2048, 768, 32, 4, 128, 151936),
    LayerShape("Qwen3-235B", 128, 8, 4096, 1536, 64, 4, 128, 151936),
    LayerShape("GLM-4.5-Air", 128, 8, 4096, 1408, 96, 8, 128, 151552, _SIGMOID),
    # Its attention is latent, which paged_attention does not compute; so it is measured without heads.
    LayerShape("DeepSeek-V3", 256, 8, 7168, 2048, 0, 0, 0, 129280, _SIGMOID | _GROUPS),
    LayerShape("gpt-oss-20b", 32, 4, 2880, 2880, 64, 8, 64, 201088, _CHOSEN),
    # Not a model's layer: published figures of fused kernels use it.
    LayerShape("E128-2816x704", 128, 8, 2816, 704, 0, 0, 0, 0),
)
RECURRENT = (  # Kimi Linear without heads, since paged_attention does not compute latent attention
    LayerShape(
        *("Qwen3-Next", 512, 10, 2048, 512, 16, 2, 256, 151936),
        recurrences={"gated_delta": RecurrenceShape(16, 32, 128, 128)},
    ),
    LayerShape(
        *("Kimi-Linear-48B", 256, 8, 2304, 1024, 0, 0, 0, 163840),
        recurrences={"kimi_delta": RecurrenceShape(32, 32, 128, 128, gates=128)},
    ),
    LayerShape(
        *("Nemotron-3-Nano", 128, 6, 2688, 1856, 32, 2, 128, 131072),
        recurrences={"mamba2": RecurrenceShape(8, 64, 128, 64)},
    ),
    LayerShape(
        *("MiniMax-Text-01", 32, 2, 6144, 9216, 64, 8, 128, 200064),
        recurrences={"lightning_attention": RecurrenceShape(64, 64, 128, 128)},
    ),
)
SPARSE = (  # without heads, since paged_attention does not compute latent attention
    LayerShape("DeepSeek-V3.2", 256, 8, 7168, 2048, 0, 0, 0, 129280, sparse=SparseShape(64, 128, 128, 576, 512, 2048)),
)
# Sizes for a CPU: the layer of the bundled model, and that of benchmarks/checkpoint.py.
SMALL = (
    LayerShape(
        *("moiety-demo", 16, 2, 128, 96, 4, 2, 32, 2048),
        recurrences={
            "gated_delta": RecurrenceShape(2, 4, 64, 64),
            "kimi_delta": RecurrenceShape(2, 2, 64, 64, gates=64),
            "mamba2": RecurrenceShape(1, 4, 64, 64),
            "lightning_attention": RecurrenceShape(2, 2, 64, 64),
        },
        sparse=SparseShape(8, 64, 8, 96, 64, 64),
    ),
    LayerShape("random-669M", 32, 4, 1024, 512, 16, 4, 64, 16000),
)
SMALL_TOKENS = (1, 16, 64, 256)
SHAPES = {shape.name: shape for shape in (*MODELS, *RECURRENT, *SPARSE, *SMALL)}


def layer_of(numbers: tuple[int, ...]) -> LayerShape:
    """Return an expert layer from its numbers E, K, D and F. Raises typer.BadParameter."""
    if len(numbers) != 4 or numbers[1] > numbers[0]:
        raise typer.BadParameter("a layer is E,K,D,F: experts, experts a token (no more), model and expert width")
    return LayerShape("E{} K{} D{} F{}".format(*numbers), *numbers, heads=0, kv_heads=0, head_width=0, vocabulary=0)
