"""The head in eight bits, beside quantized products that were requested by name, on processors that gain by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moiety_engine.config import EngineConfig
from moiety_engine.distribution.collectives import SINGLE_RANK_GROUPS
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.head import narrow_head_bytes
from moiety_engine.model.loading import load_model, load_share
from moiety_engine.offline import run_all
from moiety_engine.quantize.writing import write_quantized
from moiety_engine.startup import load_loop
from moiety_kernels.cpu import paths
from moiety_kernels.cpu.team import Program, Team
from moiety_kernels.quantization import FORMATS, INT8, QuantizedWeight, dequantize, quantize
from moiety_wire.classes import STANDARD
from moiety_wire.engine_choices import LoadFormat
from moiety_wire.messages import Sampling

PROMPT = list(range(3, 60))
HEADS = ["qwen3, tied", "mixtral, sliding window"]  # the embedding itself, and a weight of its own
AS_IT_LIES = pytest.mark.skipif(
    paths.serving_path("8 bits") is not paths.WORDS, reason="this processor does not multiply eight bits as they lie"
)


@pytest.mark.parametrize("variant", HEADS)
@pytest.mark.parametrize("name", ["int8", "int4"])
@AS_IT_LIES
def test_the_head_is_in_eight_bits_whatever_the_layers_are_in_and_embeddings_are_not(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str, name: str
) -> None:
    folder = make_checkpoint(variant).folder
    plain = load_model(folder, device="cpu", dtype="bfloat16")
    driver = make_driver(folder, dtype="bfloat16", quantization=name)
    model, weights = driver.model, driver.model._weights
    expected = quantize(plain._weights.head_VD, INT8)
    assert torch.equal(weights.head_VD.values_NK, expected.values_NK)
    assert torch.equal(weights.head_VD.scales_NG, expected.scales_NG)
    assert weights.head_VD.values_NK.nbytes + weights.head_VD.scales_NG.nbytes == narrow_head_bytes(model.spec)
    assert torch.equal(weights.embedding_VD, plain._weights.embedding_VD)
    hidden_LD = torch.randn(5, model.spec.hidden_size)
    ours, wide = model.logits(hidden_LD), plain.logits(hidden_LD)
    exact = hidden_LD @ dequantize(expected).T
    assert (ours - exact).norm() < 1e-3 * exact.norm()
    assert 1e-3 * exact.norm() < (ours - wide).norm() < 2e-2 * exact.norm()
    together = driver.prefill(make_sequence(PROMPT), 100)
    assert torch.equal(together, driver.prefill(make_sequence(PROMPT), 1)), "a row has its bits alone and among others"


@AS_IT_LIES
def test_random_weights_have_such_a_head_too(make_checkpoint: Any) -> None:
    folder = make_checkpoint("qwen3, tied").folder
    model = load_model(folder, device="cpu", dtype="auto", quantization="int4", load_format=LoadFormat.DUMMY)
    assert torch.equal(model._weights.head_VD.values_NK, quantize(model._weights.embedding_VD, INT8).values_NK)


@pytest.mark.parametrize("name", ["int8", "int4"])
@AS_IT_LIES
def test_a_checkpoint_in_few_bits_keeps_its_head_unless_it_is_asked_for_by_name(
    make_checkpoint: Any, tmp_path: Path, name: str
) -> None:
    source = make_checkpoint("mixtral, sliding window").folder
    write_quantized(source, tmp_path / "narrow", FORMATS[name], lambda *_: None)
    plain = load_model(source, device="cpu", dtype="bfloat16")._weights
    as_stored, asked, wide = (
        load_model(tmp_path / "narrow", device="cpu", dtype="bfloat16", quantization=one)._weights
        for one in ("auto", name, "none")
    )
    assert torch.equal(as_stored.head_VD, plain.head_VD) and torch.equal(wide.head_VD, plain.head_VD)
    assert torch.equal(dequantize(asked.head_VD), dequantize(quantize(plain.head_VD, INT8)))
    for ours, theirs in zip(asked.layers, as_stored.layers, strict=True):
        assert torch.equal(ours.ffn.down_EDF.values_NK, theirs.ffn.down_EDF.values_NK)


def test_eight_bit_heads_are_limited_to_supported_formats_and_processors(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3, tied").folder

    def head(quantization: str) -> Any:
        return load_model(folder, device="cpu", dtype="bfloat16", quantization=quantization)._weights.head_VD

    assert all(isinstance(head(one), torch.Tensor) for one in ("auto", "none", "fp8"))
    monkeypatch.setattr(paths, "is_usable", lambda path: path is paths.FLOATS)
    assert isinstance(head("int8"), torch.Tensor)


@AS_IT_LIES
def test_ranks_have_the_rows_of_the_head_that_one_alone_has(make_checkpoint: Any) -> None:
    folder = make_checkpoint("mixtral, sliding window").folder
    how: Any = {"device": "cpu", "dtype": "bfloat16", "quantization": "int8"}
    alone = load_share(folder, **how).weights.head_VD
    rank_positions = [replace(SINGLE_RANK_GROUPS, rank_position=RankPosition(Layout(tp=2), rank)) for rank in range(2)]
    parts = [load_share(folder, ranks=rank_position, **how).weights.head_VD for rank_position in rank_positions]
    assert all(isinstance(part, QuantizedWeight) for part in (alone, *parts))
    assert torch.equal(torch.cat([dequantize(part) for part in parts]), dequantize(alone))


@AS_IT_LIES
def test_steps_from_tokens_to_logits_are_replayed_with_such_a_head(
    make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3, tied").folder
    sizes: dict[str, Any] = {"max_running": 4, "max_batch_tokens": 64, "kv_memory_bytes": 1 << 20}
    config = EngineConfig(model=str(folder), name="t", dtype="bfloat16", quantization="int8", **sizes)
    submit = CoreSubmit(1, "t", STANDARD, PROMPT, Sampling(temperature=0.0), 12, 0, [], 12, b"s", 0)
    with load_loop(config) as loop:
        jobs: list[int] = []
        replay = Team.replay

        def note(self: Team, program: Program) -> None:
            jobs.append(program.num_jobs)
            replay(self, program)

        monkeypatch.setattr(Team, "replay", note)
        replayed = run_all(loop, [submit])[1].token_ids
        (recorded,) = loop.executor.model._programs._recorded.values()
        assert jobs[-10:] == [recorded.whole.num_jobs] * 10
        assert recorded.whole.num_jobs == recorded.layers.num_jobs + 2, "the embedding's rows, and the logits"
        monkeypatch.setattr(type(loop.executor.model), "decode", lambda *_, **__: None)
        loop.executor.model._programs = None
        again = msgspec.structs.replace(submit, key=2)
        assert run_all(loop, [again])[2].token_ids == replayed
