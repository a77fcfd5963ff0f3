"""Small BERT checkpoints with random weights, saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

SaveBert = Callable[..., tuple[Path, Any]]


@pytest.fixture
def save_bert(tmp_path: Path) -> SaveBert:
    """`save_bert(labels=(…), **config)` returns the folder and transformers' model; without labels it has no head."""

    def save(labels: tuple[str, ...] = (), **changes: Any) -> tuple[Path, Any]:
        torch.manual_seed(3)
        named: dict[str, Any] = {"id2label": dict(enumerate(labels))} if labels else {}
        config = transformers.BertConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
            **{**named, **changes},
        )
        kind = transformers.BertForSequenceClassification if labels else transformers.BertModel
        model = kind(config).eval()
        for one in model.parameters():  # biases and norms of new models are zeros and ones
            one.data += 0.3 * torch.randn_like(one)
        folder = tmp_path / "bert"
        model.save_pretrained(folder)
        return folder, model

    return save
