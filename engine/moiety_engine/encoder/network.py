"""The encoders BERT and RoBERTa: bidirectional attention over a packed batch of whole inputs, pooling and the head.

T tokens of all inputs together, N inputs, D model width, H heads, L padded length of a group of inputs.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as nnf

from moiety_engine.model.checkpoint import tensor_files
from moiety_engine.model.errors import WeightsError
from moiety_engine.pooling import PoolingKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from moiety_engine.encoder.config import EncoderSpec

_PREFIXES = ("bert.", "roberta.")
_HEAD_LAYERS = {False: ("pooler.dense", "classifier"), True: ("classifier.dense", "classifier.out_proj")}  # RoBERTa's
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nnf.gelu,
    "gelu_new": lambda x: nnf.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "relu": nnf.relu,
    "silu": nnf.silu,
}


class AttentionGroup:
    """Inputs of similar length, padded to the longest: rows of the packed tokens, and the mask of keys."""

    def __init__(self, begins: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        longest = max(lengths)
        at_L = torch.arange(longest)
        length_N1 = torch.tensor(lengths)[:, None]
        valid_NL = at_L < length_N1
        row_NL = torch.tensor(begins)[:, None] + torch.minimum(at_L, length_N1 - 1)  # padding repeats a token
        self.row_NL = row_NL.to(device)
        self.valid_NL = valid_NL.to(device)
        self.is_full = bool(valid_NL.all())


def groups_of(lengths: Sequence[int], device: torch.device) -> list[AttentionGroup]:
    """Group inputs whose lengths have the same number of bits, so that less than half of a group is padding."""
    by_bits: dict[int, tuple[list[int], list[int]]] = {}
    begin = 0
    for length in lengths:
        begins, sizes = by_bits.setdefault(length.bit_length(), ([], []))
        begins.append(begin)
        sizes.append(length)
        begin += length
    return [AttentionGroup(begins, sizes, device) for begins, sizes in by_bits.values()]


class EncoderNetwork:
    """Weights of an encoder on one device, and its forward pass."""

    def __init__(self, spec: EncoderSpec, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self._weights = weights

    @torch.inference_mode()
    def run(self, inputs: Sequence[tuple[Sequence[int], int]]) -> Tensor:
        """Return one float32 row for each input, in host memory: its vector, or the logits of the head.

        An input is its token ids and the index of the first token of its second text, 0 if it has only one.
        """
        lengths = [len(ids) for ids, _ in inputs]
        ids_T = torch.tensor([one for ids, _ in inputs for one in ids], device=self.device)
        position_T = torch.tensor([at for ids, _ in inputs for at in self._positions(ids)], device=self.device)
        segment_T = torch.tensor(
            [int(0 < second <= i) for length, (_, second) in zip(lengths, inputs, strict=True) for i in range(length)],
            device=self.device,
        )
        hidden_TD = self._embed(ids_T, position_T, segment_T)
        groups = groups_of(lengths, self.device)
        for layer in range(self.spec.num_layers):
            hidden_TD = self._layer(f"encoder.layer.{layer}.", hidden_TD, groups)
        if self.spec.labels:
            return self._logits(hidden_TD, lengths).float().cpu()
        pooled_ND = self._pool(hidden_TD.float(), lengths)
        return (nnf.normalize(pooled_ND, dim=-1) if self.spec.pooling.normalizes else pooled_ND).cpu()

    def _positions(self, ids: Sequence[int]) -> Iterable[int]:
        first, padding_id = self.spec.first_position, self.spec.padding_id
        if padding_id is None or padding_id not in ids:
            return range(first, first + len(ids))
        counts = accumulate(int(token_id != padding_id) for token_id in ids)
        return [padding_id + (token_id != padding_id) * count for token_id, count in zip(ids, counts, strict=True)]

    def _embed(self, ids_T: Tensor, position_T: Tensor, segment_T: Tensor) -> Tensor:
        of = self._weights
        x_TD = of["embeddings.word_embeddings.weight"][ids_T]
        x_TD = x_TD + of["embeddings.token_type_embeddings.weight"][segment_T.clamp(max=self.spec.num_segments - 1)]
        return self._norm("embeddings.LayerNorm", x_TD + of["embeddings.position_embeddings.weight"][position_T])

    def _layer(self, prefix: str, x_TD: Tensor, groups: Sequence[AttentionGroup]) -> Tensor:
        query_TD, key_TD, value_TD = (
            self._linear(f"{prefix}attention.self.{name}", x_TD) for name in ("query", "key", "value")
        )
        mixed_TD = torch.empty_like(query_TD)
        for group in groups:
            mixed_TD[group.row_NL[group.valid_NL]] = self._attend(group, query_TD, key_TD, value_TD)
        x_TD = self._norm(
            f"{prefix}attention.output.LayerNorm", self._linear(f"{prefix}attention.output.dense", mixed_TD) + x_TD
        )
        wide_TF = _ACTIVATIONS[self.spec.hidden_act](self._linear(f"{prefix}intermediate.dense", x_TD))
        return self._norm(f"{prefix}output.LayerNorm", self._linear(f"{prefix}output.dense", wide_TF) + x_TD)

    def _attend(self, group: AttentionGroup, query_TD: Tensor, key_TD: Tensor, value_TD: Tensor) -> Tensor:
        """Return the attention output of the group's tokens, without padding, in the order of `row_NL`."""
        num_inputs, longest = group.row_NL.shape
        query_NHLd, key_NHLd, value_NHLd = (
            x_TD[group.row_NL].view(num_inputs, longest, self.spec.num_heads, -1).transpose(1, 2)
            for x_TD in (query_TD, key_TD, value_TD)
        )
        mask = None if group.is_full else group.valid_NL[:, None, None, :]
        mixed_NHLd = nnf.scaled_dot_product_attention(query_NHLd, key_NHLd, value_NHLd, attn_mask=mask)
        return mixed_NHLd.transpose(1, 2).flatten(2)[group.valid_NL]

    def _pool(self, hidden_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        parts = torch.functional.split(hidden_TD, list(lengths))
        match self.spec.pooling.kind:
            case PoolingKind.CLS:
                return torch.stack([part[0] for part in parts])
            case PoolingKind.LAST:
                return torch.stack([part[-1] for part in parts])
            case PoolingKind.MAX:
                return torch.stack([part.amax(0) for part in parts])
            case PoolingKind.MEAN:
                return torch.stack([part.mean(0) for part in parts])
            case PoolingKind.MEAN_SQRT_LEN:
                return torch.stack([part.sum(0) / len(part) ** 0.5 for part in parts])

    def _logits(self, hidden_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        first_ND = torch.stack([part[0] for part in torch.functional.split(hidden_TD, list(lengths))])
        dense, classifier = _HEAD_LAYERS[self.spec.padding_id is not None]
        return self._linear(classifier, torch.tanh(self._linear(dense, first_ND)))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return nnf.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        weight_D, bias_D = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return nnf.layer_norm(x_TD, (self.spec.hidden_size,), weight_D, bias_D, self.spec.norm_eps)


def load_encoder(folder: Path, spec: EncoderSpec, device: torch.device, dtype: torch.dtype) -> EncoderNetwork:
    """Load the tensors that the encoder needs. Raises WeightsError."""
    files = {_own_name(name): (path, name) for name, path in tensor_files(folder).items()}
    weights = {}
    for name, shape in _shapes(spec).items():
        if name not in files:
            raise WeightsError(f"{folder} lacks the tensor {name!r}; download the checkpoint again")
        path, stored = files[name]
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(stored)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"{stored} has shape {tuple(tensor.shape)}, but config.json requires {shape}")
        weights[name] = tensor.to(device, dtype)
    return EncoderNetwork(spec, weights, device, dtype)


def _own_name(stored: str) -> str:
    """Return a tensor's name without the model's prefix; old checkpoints call norms' weights gamma and beta."""
    name = stored
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _shapes(spec: EncoderSpec) -> dict[str, tuple[int, ...]]:
    width, inner = spec.hidden_size, spec.intermediate_size
    linear, norms = {}, ["embeddings.LayerNorm"]
    for layer in range(spec.num_layers):
        prefix = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear[f"{prefix}attention.{name}"] = (width, width)
        linear |= {f"{prefix}intermediate.dense": (inner, width), f"{prefix}output.dense": (width, inner)}
        norms += [f"{prefix}attention.output.LayerNorm", f"{prefix}output.LayerNorm"]
    if spec.labels:
        dense, classifier = _HEAD_LAYERS[spec.padding_id is not None]
        linear |= {dense: (width, width), classifier: (len(spec.labels), width)}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (spec.vocab_size, width),
        "embeddings.position_embeddings.weight": (spec.num_positions, width),
        "embeddings.token_type_embeddings.weight": (spec.num_segments, width),
    }
    for name, (rows, columns) in linear.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes
