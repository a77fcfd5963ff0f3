"""A model whose experts do not fit: a cache of some of them gives the same bits as all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moiety_engine.config import ExpertEviction, Offload, OffloadConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.model import checkpoint as reading
from moiety_engine.model.loading import load_model
from moiety_engine.offload.cache import ExpertCache
from moiety_engine.offload.file import ExpertFile
from moiety_wire.engine_choices import LoadFormat

PROMPT = list(range(3, 60))
OTHER = [7, 9, 300, 42, 8]


def offloaded(folder: Path, num_bytes: int | None = None, **more: Any) -> OffloadConfig:
    return OffloadConfig(what=Offload.EXPERTS, memory_bytes=num_bytes, folder=str(folder / "offload"), **more)


def answers(driver: Any, make_sequence: Any) -> Tensor:
    """Return logits of a prompt in chunks, token by token, and beside another sequence."""
    found = [driver.prefill(make_sequence(PROMPT), 20), driver.prefill(make_sequence(PROMPT), 1)]
    one, two = make_sequence(PROMPT), make_sequence(OTHER)
    while one.num_stored < len(OTHER):
        found += driver.step([(one, 1), (two, 1)])
    return torch.cat(found)


def expert_bytes(cache: ExpertCache) -> int:
    """Return the bytes of all experts."""
    return cache.num_bytes // cache.layers[0].num_slots * cache.num_experts[0]


FAMILIES = ["qwen3_moe", "mixtral", "dbrx", "deepseek_v3", "deepseek_v4", "gpt_oss"]


@pytest.mark.parametrize("variant", FAMILIES)
def test_with_a_quarter_of_the_experts_on_the_device_the_bits_are_those_of_all_of_them(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, variant: str
) -> None:
    folder = make_checkpoint(variant).folder
    expected = answers(make_driver(folder), make_sequence)
    every = make_driver(folder, offload=offloaded(folder, 1 << 30)).model.expert_cache
    all_bytes, top_k = expert_bytes(every), 2 if variant in ("qwen3_moe", "mixtral") else 3
    assert every.num_bytes == all_bytes
    budget = max(all_bytes // 4, all_bytes // every.num_experts[0] * top_k)
    found = make_driver(folder, offload=offloaded(folder, budget))
    cache = found.model.expert_cache
    assert cache.num_bytes <= budget < all_bytes
    assert torch.equal(answers(found, make_sequence), expected)
    assert cache.traffic.misses_total > 0
    assert cache.traffic.hits_total > 0


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("eviction", list(ExpertEviction))
def test_output_bits_do_not_depend_on_expert_eviction_and_prefetch(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any, eviction: ExpertEviction, prefetch: bool
) -> None:
    folder = make_checkpoint("qwen3_moe").folder
    config = offloaded(folder, 3 * 2 * 3 * 48 * 64 * 4, eviction=eviction, prefetch=prefetch)
    found = make_driver(folder, offload=config)
    cache = found.model.expert_cache
    assert cache.num_slots == 2 * 3
    assert torch.equal(answers(found, make_sequence), answers(make_driver(folder), make_sequence))
    assert prefetch or cache.traffic.prefetched_total == 0
    assert prefetch or eviction is not ExpertEviction.ALL or cache.traffic.hits_total == 0


@pytest.mark.parametrize(
    ("variant", "kept", "num_bytes"),
    [
        ("mixtral, sliding window", "none", 250_000),
        ("mixtral, sliding window", "int8", 140_000),
        ("mixtral, sliding window", "fp8", 140_000),
        ("gpt_oss, experts as wide as blocks", "int4", 80_000),
    ],
)
def test_quantized_experts_are_offloaded_and_found_at_the_next_start(
    make_checkpoint: Any,
    make_driver: Any,
    make_sequence: Any,
    variant: str,
    kept: str,
    num_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint(variant).folder
    expected = answers(make_driver(folder, dtype="bfloat16", quantization=kept), make_sequence)
    config = offloaded(folder, num_bytes)

    def found() -> Tensor:
        driver = make_driver(folder, dtype="bfloat16", quantization=kept, offload=config)
        assert driver.model.expert_cache.layers[0].num_slots < 4
        return answers(driver, make_sequence)

    assert torch.equal(found(), expected)
    read: set[str] = set()
    fill_one = reading._fill_one

    def note_and_fill(name: str, *rest: Any) -> Any:
        read.add(name)
        return fill_one(name, *rest)

    monkeypatch.setattr(reading, "_fill_one", note_and_fill)
    assert torch.equal(found(), expected)
    assert read
    assert not any("experts" in name for name in read), "experts were read once more"


def test_float8_experts_of_a_checkpoint_stay_in_float8(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    folder = make_checkpoint("deepseek_v3, as wide as blocks").folder
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 300
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), name + "_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    expected = answers(make_driver(folder, dtype="bfloat16"), make_sequence)
    for _ in range(2):
        found = make_driver(folder, dtype="bfloat16", offload=offloaded(folder, 80_000))
        assert found.model.expert_cache.slots[0]["gate_up"].dtype is torch.float8_e4m3fn
        assert torch.equal(answers(found, make_sequence), expected)


def test_a_file_that_was_not_finished_or_is_of_other_weights_is_not_taken(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    folder = make_checkpoint("mixtral").folder
    config = offloaded(folder, 450_000)
    expected = answers(make_driver(folder, offload=config), make_sequence)
    (written,) = (folder / "offload").glob("*.bin")
    whole = written.read_bytes()
    written.write_bytes(whole[:-4096])
    assert torch.equal(answers(make_driver(folder, offload=config), make_sequence), expected)
    assert written.read_bytes() == whole
    written.with_suffix(".json").unlink()
    written.write_bytes(bytes(len(whole)))
    assert torch.equal(answers(make_driver(folder, offload=config), make_sequence), expected)
    assert written.read_bytes() == whole
    make_driver(folder, dtype="bfloat16", offload=config)
    assert len(list((folder / "offload").glob("*.bin"))) == 2
    assert not list((folder / "offload").glob("*.partial"))


def test_experts_of_other_weights_in_the_same_place_are_not_taken_for_these(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    folder = make_checkpoint("mixtral").folder
    config, path = offloaded(folder, 450_000), folder / "model.safetensors"
    before = answers(make_driver(folder, offload=config), make_sequence)
    size = path.stat().st_size
    save_file({name: tensor * 1.5 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    assert path.stat().st_size == size
    after = answers(make_driver(folder, offload=config), make_sequence)
    assert torch.equal(after, answers(make_driver(folder), make_sequence))
    assert not torch.equal(after, before)


def test_an_expert_that_cannot_be_read_fails_the_step_and_says_what_to_do(
    make_checkpoint: Any, make_driver: Any, make_sequence: Any
) -> None:
    folder = make_checkpoint("mixtral").folder
    driver = make_driver(folder, offload=offloaded(folder, 450_000))
    (written,) = (folder / "offload").glob("*.bin")
    with written.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(OSError, match="is incomplete: delete it and start again"):
        answers(driver, make_sequence)


def test_a_model_takes_the_memory_of_its_slots_and_not_of_its_experts(make_checkpoint: Any, make_driver: Any) -> None:
    folder = make_checkpoint("mixtral").folder
    model = make_driver(folder, offload=offloaded(folder, 450_000)).model
    plain = make_driver(folder).model
    ours, theirs = (sum(storage.nbytes() for storage in one._weight_offload._storages) for one in (model, plain))
    cache = model.expert_cache
    assert theirs - ours == expert_bytes(cache) - cache.num_bytes
    assert cache.num_bytes <= 450_000 < expert_bytes(cache) / 2
    assert model.experts.expert_bytes == plain.experts.expert_bytes


def test_without_a_size_half_of_what_the_rest_leaves_free_is_for_experts(
    make_checkpoint: Any, make_driver: Any
) -> None:
    folder = make_checkpoint("mixtral").folder
    cache = make_driver(folder, offload=offloaded(folder)).model.expert_cache
    assert cache.num_bytes == expert_bytes(cache), "a machine of which half holds not even this"


@pytest.mark.parametrize(
    ("variant", "config", "more", "says"),
    [
        ("mixtral", OffloadConfig(what=Offload.EXPERTS, memory_bytes=140_000, folder="/nowhere"), {},
         "140000 bytes hold 0 experts for each of 3 layers, but a token needs 2: set .* at least 294912"),
        ("mixtral", OffloadConfig(what=Offload.EXPERTS), {}, "kept in a file.*set --offload-folder"),
        ("mixtral", OffloadConfig(what=Offload.EXPERTS, folder="/dev/null/x"), {}, "choose another --offload-folder"),
        ("qwen3, tied", OffloadConfig(what=Offload.EXPERTS, folder="/tmp"), {}, "a qwen3 model has no experts"),
        ("mixtral", OffloadConfig(what=Offload.EXPERTS), {"load_format": LoadFormat.DUMMY}, "leave out --load-format"),
    ],
)  # fmt: skip
def test_unsupported_offload_settings_are_refused_with_advice(
    make_checkpoint: Any, variant: str, config: OffloadConfig, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidConfig, match=says):
        load_model(make_checkpoint(variant).folder, device="cpu", dtype="float32", offload=config, **more)


def test_a_full_disk_is_reported_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    file = ExpertFile(tmp_path, "0")
    with pytest.raises(InvalidConfig, match=r"do not fit on the disk .* free space there"):
        file.empty((4, 8), torch.float32)
    assert not list(tmp_path.iterdir())


def test_unfinished_files_of_dead_engines_are_removed_and_those_of_live_ones_kept(
    tmp_path: Path,
) -> None:
    (tmp_path / "experts-0.1.partial").write_bytes(b"half")
    writing = ExpertFile(tmp_path, "1")
    writing.empty((4, 8), torch.float32)
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["experts-1"]
    ExpertFile(tmp_path, "2").close()
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["experts-1"]
    writing.close()
    assert not list(tmp_path.iterdir())


def test_a_start_that_was_refused_leaves_nothing_that_the_next_one_waits_for(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    folder, how = make_checkpoint("qwen3_moe").folder, {"device": "cpu", "dtype": "float32"}
    config = OffloadConfig(what=Offload.EXPERTS, memory_bytes=1, folder=str(tmp_path / "offload"))
    for _ in range(2):
        with pytest.raises(InvalidConfig, match="expert-memory-bytes"):
            load_model(folder, offload=config, **how)
        assert not list((tmp_path / "offload").iterdir())
