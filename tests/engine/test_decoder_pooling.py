"""Embeddings of decoders: the last token's, unless the checkpoint names another pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from moiety_engine.config import EngineConfig, NormalizeEmbeddings, PoolingChoice
from moiety_engine.errors import InvalidConfig
from moiety_engine.pooling import decoder_embeds


def checkpoint(folder: Path, mode: str, *more: str) -> Path:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *(("x", one) for one in more)]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    return folder


def embeds(folder: Path, **options: Any) -> bool:
    return decoder_embeds(EngineConfig(model=str(folder), name="d", **options))


def test_a_decoder_without_files_of_sentence_transformers_embeds(tmp_path: Path) -> None:
    assert embeds(tmp_path)


def test_a_decoder_that_was_trained_at_its_last_token_embeds(tmp_path: Path) -> None:
    assert embeds(checkpoint(tmp_path, "lasttoken", "Normalize"))


@pytest.mark.parametrize(("mode", "more"), [("mean_tokens", ()), ("lasttoken", ("Dense",))])
def test_a_decoder_with_another_pooling_makes_no_embeddings(tmp_path: Path, mode: str, more: tuple[str, ...]) -> None:
    assert not embeds(checkpoint(tmp_path, mode, *more))


def test_a_decoder_without_unit_vectors_makes_no_embeddings_unless_the_option_asks_for_them(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "lasttoken")
    with structlog.testing.capture_logs() as logs:
        assert not embeds(folder)
    assert "no Normalize module" in logs[0]["reason"]
    assert "--normalize-embeddings on" in logs[0]["advice"]
    assert embeds(folder, normalize_embeddings=NormalizeEmbeddings.ON)


def test_the_options_replace_the_pooling_of_the_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "mean_tokens")
    assert not embeds(folder, pooling=PoolingChoice.LAST)
    assert embeds(folder, pooling=PoolingChoice.LAST, normalize_embeddings=NormalizeEmbeddings.ON)


def test_poolings_of_encoders_are_refused_for_decoders(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--pooling mean is available for encoder models only"):
        embeds(tmp_path, pooling=PoolingChoice.MEAN)
    with pytest.raises(InvalidConfig, match="--normalize-embeddings off is available for encoder models only"):
        embeds(tmp_path, normalize_embeddings=NormalizeEmbeddings.OFF)
