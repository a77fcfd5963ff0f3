"""Small checkpoints of encoders with random weights, saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SaveEncoder = Callable[..., tuple[Path, Any]]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # prefix of transformers' classes, and fields of the configuration
    "bert": ("Bert", {"max_position_embeddings": 64}),
    "roberta": ("Roberta", {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {"max_position_embeddings": 69, "type_vocab_size": 1, "pad_token_id": 4}),
    "camembert": ("Camembert", {"max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}),
}


@pytest.fixture
def save_encoder(tmp_path: Path) -> SaveEncoder:
    """`save_encoder(family, labels, **config)` returns the folder and transformers' model; a head has the labels."""
    import transformers

    def save(family: str = "bert", labels: tuple[str, ...] = (), **changes: Any) -> tuple[Path, Any]:
        torch.manual_seed(3)
        name, own = KINDS[family]
        named: dict[str, Any] = {"id2label": dict(enumerate(labels))} if labels else {}
        config = getattr(transformers, f"{name}Config")(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            **{**own, **named, **changes},
        )
        model = getattr(transformers, name + ("ForSequenceClassification" if labels else "Model"))(config).eval()
        for one in model.parameters():  # biases and norms of new models are zeros and ones
            one.data += 0.3 * torch.randn_like(one)
        folder = tmp_path / family
        model.save_pretrained(folder)
        return folder, model

    return save
