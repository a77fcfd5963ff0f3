"""Parts of a model's pass that decode programs record and replay on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moiety_engine.model.batch import Batch, KvCache
    from moiety_engine.model.decode_programs import DecodePrograms
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.vocabulary import Vocabulary


class RecordedModel(Protocol):
    """A model whose decodes are recorded."""

    spec: ModelSpec
    vocabulary: Vocabulary
    activation_dtype: torch.dtype

    def scale_input(self, x_TD: Tensor) -> Tensor: ...
    def run_layers(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> tuple[Tensor, Tensor]: ...
    def logits(self, hidden_LD: Tensor) -> Tensor: ...


class RecordedPass:
    """Embedding, layers and logits of a model, each as one function of tensors."""

    def __init__(self, model: RecordedModel) -> None:
        self._model = model

    def begin(self, token_ids_T: Tensor) -> Tensor:
        """Return the input of the first layer."""
        model = self._model
        x_TD = model.vocabulary.look_up(token_ids_T, model.activation_dtype, model.spec.embedding_multiplier)
        return model.scale_input(x_TD)

    def layers(self, x_TD: Tensor, batch: Batch, kv: KvCache) -> Tensor:
        """Return the output of all layers after the final norm."""
        return self._model.run_layers(x_TD, batch, kv)[1]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return the logits of hidden states after the final norm."""
        return self._model.logits(hidden_SD)


def record_programs(model: RecordedModel) -> DecodePrograms:
    """Return the decode programs of a model, which record nothing yet."""
    from moiety_engine.model.decode_programs import DecodePrograms  # noqa: PLC0415 - numba, of no use on a GPU

    return DecodePrograms(RecordedPass(model))
