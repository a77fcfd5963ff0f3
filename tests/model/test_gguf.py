"""GGUF files are served as the checkpoints that they were made from; llama.cpp's own package writes and reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests import gguf_checkpoints
from tests.gguf_checkpoints import Type, write_gguf

from moiety_engine.checkpoint import fingerprint, resolve_checkpoint
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import CheckpointError
from moiety_engine.gguf.header import read_header
from moiety_engine.model.checkpoint import load
from moiety_engine.model.checkpoint_formats.gguf_blocks import READERS, dequantized
from moiety_engine.model.errors import ModelError
from moiety_engine.model.families import read_spec
from moiety_engine.model.weights import products_of
from moiety_kernels.quantization import MXFP4, QuantizedWeight, WeightFormat, dequantize
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer

PROMPT = list(range(3, 60))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", READERS)
def test_blocks_stand_for_the_values_that_llama_cpp_reads(kind: str) -> None:
    raw = gguf_checkpoints.random_blocks(getattr(Type, kind), 3, 2)
    expected = gguf.quants.dequantize(raw, getattr(Type, kind))
    assert np.isfinite(expected).all()
    assert torch.equal(dequantized(torch.from_numpy(raw), kind), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("variant", "splits_keys"),
    [
        ("llama, llama3 rope of long models", False),
        ("mixtral", False),
        ("qwen2, no windows", False),
        ("qwen3, tied", False),
        ("qwen2_moe, no dense layers", False),
        ("qwen3_moe", False),
        ("gpt_oss", False),
        ("deepseek_v2", False),
        ("deepseek_v3, no biases", True),
    ],
)
def test_an_architecture_is_the_model_that_it_was_made_from(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, tmp_path: Path, variant: str, splits_keys: bool
) -> None:
    checkpoint = make_checkpoint(variant)
    write_gguf(checkpoint.folder, tmp_path / "model.gguf", splits_keys=splits_keys)
    folder = resolve_checkpoint(str(tmp_path / "model.gguf"))
    ours = make_driver(folder).prefill(make_sequence(PROMPT), 64).log_softmax(-1)
    assert (ours - checkpoint.logprobs(PROMPT)).abs().max() <= 1e-4


KEPT = {
    Type.Q4_0: WeightFormat("int4", 4, 32),
    Type.Q4_1: WeightFormat("int4", 4, 32, offsets=True),
    Type.Q8_0: WeightFormat("int8", 8, 32),
    Type.Q5_0: WeightFormat("int8", 8, 32),
    Type.Q5_1: None,
    Type.BF16: None,
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_type_that_a_kernel_reads_is_kept_and_others_are_widened(
    make_checkpoint: Any, tmp_path: Path, kind: Type
) -> None:
    folder = make_checkpoint("llama, llama3 rope of long models").folder
    write_gguf(folder, tmp_path / "model.gguf", kind)
    folder = resolve_checkpoint(str(tmp_path / "model.gguf"))
    spec = read_spec(folder)
    assert spec.weight_format == KEPT[kind]
    for layout in (Layout(), Layout(tp=2)):
        for rank in range(layout.num_ranks):
            how: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "rank_position": RankPosition(layout, rank)}
            wide = list(products_of(load(folder, spec, **how)))
            kept = list(products_of(load(folder, spec, form=KEPT[kind], **how)))
            for one, plain in zip(kept, wide, strict=True):
                assert isinstance(one, QuantizedWeight) is (KEPT[kind] is not None)
                torch.testing.assert_close(one if isinstance(one, torch.Tensor) else dequantize(one), plain)


def test_experts_in_mxfp4_are_kept_and_ranks_read_their_own(make_checkpoint: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss, experts as wide as blocks").folder
    tensors = gguf_checkpoints.tensors_of(folder, json.loads((folder / "config.json").read_text()), splits_keys=False)
    write_gguf(folder, tmp_path / "model.gguf", Type.MXFP4)
    made = resolve_checkpoint(str(tmp_path / "model.gguf"))
    spec = read_spec(made)
    assert spec.weight_format == MXFP4
    array = tensors["blk.1.ffn_down_exps.weight"].contiguous().numpy()
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, Type.MXFP4), Type.MXFP4))
    for rank in range(2):
        weights = load(
            made,
            spec,
            device=CPU,
            dtype=torch.bfloat16,
            form=MXFP4,
            rank_position=RankPosition(Layout(tp=2, ep=2), rank),
        )
        down = weights.layers[1].ffn.down_EDF
        assert torch.equal(dequantize(down), expected[2 * rank : 2 * rank + 2])


def test_text_is_split_and_ended_as_the_metadata_say(make_checkpoint: Any, tmp_path: Path) -> None:
    write_gguf(make_checkpoint("qwen3, tied").folder, tmp_path / "model.gguf")
    text = read_text_model(resolve_checkpoint(str(tmp_path / "model.gguf")))
    tokenizer = Tokenizer.from_json(text.tokenizer_json)
    ids = tokenizer.encode("ab <|256|>ä")
    assert [tokenizer.token(one) for one in ids] == ["ab", "Ġ", "<|256|>", "Ã", "¤"]
    assert text.eos_token_ids == (257, 258)
    assert text.special_tokens == {"bos_token": "<|256|>", "eos_token": "<|257|>"}
    assert text.chat_template.startswith("{% for message in messages %}")


def test_copies_of_a_file_have_one_fingerprint_and_a_changed_file_another_folder(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    path, copy = tmp_path / "model.gguf", tmp_path / "elsewhere" / "copy.gguf"
    write_gguf(make_checkpoint("qwen3, tied").folder, path)
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    first, second = resolve_checkpoint(str(path)), resolve_checkpoint(str(copy))
    assert first != second
    assert fingerprint(first) == fingerprint(second)
    data = bytearray(copy.read_bytes())
    data[-2000:] = bytes(2000)
    copy.write_bytes(bytes(data))
    assert resolve_checkpoint(str(copy)) != second
    assert fingerprint(resolve_checkpoint(str(copy))) != fingerprint(first)


def test_damaged_files_are_refused_wherever_they_are_cut(make_checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint("qwen3, tied").folder, path)
    whole = path.read_bytes()
    for size in [0, 3, 7, 20, 100, 3000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(
            CheckpointError, match=r"model\.gguf is (empty|not a complete GGUF file).*download it again"
        ):
            read_header(path)
    for at, number, what in ((8, 1 << 40, "tensors"), (16, 1 << 60, "metadata entries"), (24, 1 << 50, "a text has")):
        path.write_bytes(whole[:at] + number.to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(CheckpointError, match=what):
            read_header(path)
    array = (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
                     + (1).to_bytes(8, "little") + b"k" + array)  # fmt: skip
    with pytest.raises(CheckpointError, match=f"an array has {1 << 40} values"):
        read_header(path)


def test_changed_bytes_of_a_header_end_in_a_clear_error_or_in_a_model(make_checkpoint: Any, tmp_path: Path) -> None:
    path, generator = tmp_path / "model.gguf", random.Random(5)
    write_gguf(make_checkpoint("deepseek_v3, no biases").folder, path)
    whole, refused = path.read_bytes(), 0
    end = min(entry.offset for entry in read_header(path).tensors.values())
    for _ in range(120):
        changed = bytearray(whole)
        at = generator.choice((generator.randrange(1200), generator.randrange(end - 3000, end)))
        changed[at] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(changed))
        try:
            read_spec(resolve_checkpoint(str(path)))
        except (CheckpointError, ModelError) as exc:
            assert "\n" not in str(exc)
            refused += 1
    assert 20 < refused < 120


def test_unsupported_gguf_files_are_refused_with_an_alternative(make_checkpoint: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tensor("x", np.zeros((1, 256), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture 'mamba'; of GGUF files these are read: llama, .*format"):
        resolve_checkpoint(str(tmp_path / "other.gguf"))
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint("qwen3, tied").folder, path)
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(data[:at] + (16).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(
        CheckpointError, match=r"ffn_up\.weight in GGUF's type 16, which is not supported; supported types are F32"
    ):
        resolve_checkpoint(str(path))
    path.write_bytes(data.replace(b"smollm", b"smallm"))
    with pytest.raises(CheckpointError, match="splits texts as 'smallm', which is not known; known are gpt-2"):
        resolve_checkpoint(str(path))
    with pytest.raises(CheckpointError, match=r"missing\.gguf does not exist"):
        resolve_checkpoint(str(tmp_path / "missing.gguf"))
    with pytest.raises(CheckpointError, match=r"has no config\.json; give the path of model\.gguf"):
        resolve_checkpoint(str(tmp_path / "elsewhere" if (tmp_path / "elsewhere").exists() else _folder_of(path)))


def _folder_of(path: Path) -> Path:
    folder = path.parent / "only"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(path.read_bytes())
    return folder


def test_a_model_in_several_files_is_read_from_the_first(make_checkpoint: Any, tmp_path: Path) -> None:
    write_gguf(make_checkpoint("qwen3, tied").folder, tmp_path / "model-00001-of-00002.gguf")
    first = tmp_path / "model-00001-of-00002.gguf"
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf is missing: a model in 2 files"):
        read_header(first)
    writer = gguf.GGUFWriter(tmp_path / "model-00002-of-00002.gguf", "qwen3")
    writer.add_tensor("more.weight", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(first)
    assert header.tensors["more.weight"].path.name == "model-00002-of-00002.gguf"
    assert "output_norm.weight" in header.tensors
    with pytest.raises(CheckpointError, match="is not the first file of its model"):
        read_header(tmp_path / "model-00002-of-00002.gguf")
