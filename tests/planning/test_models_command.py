"""`moiety models` and the table of families agree with the readers, the layouts and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import moiety_demo
from moiety_engine.model.families import FAMILIES
from moiety_engine.model.families.catalog import CATALOG
from moiety_engine.model.families.unsupported import UNSUPPORTED
from moiety_engine.model.families.wrapped import WRAPPERS
from moiety_engine.planning.model_support import family_features, family_spec, family_table, features_of, report_on
from moiety_platform.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["models", *arguments])
    said = capsys.readouterr()
    return int(done.value.code or 0), said.out, " ".join(said.err.split())


def demo_copy(folder: Path, *, without: str = "", **changes: Any) -> Path:
    source = moiety_demo.checkpoint_path()
    for path in source.iterdir():
        if path.is_file() and path.name != without:
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_every_family_is_in_the_catalogue() -> None:
    assert CATALOG.keys() == FAMILIES.keys()


def test_the_page_has_the_table_that_the_code_makes() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert family_table() in page, "write it anew: moiety models --markdown"


def test_the_page_lists_every_family_that_is_refused_with_a_reason() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    listed = {name for name in UNSUPPORTED if f"`{name}`" in page or f"`{name.removesuffix('_text')}`" in page}
    assert listed == UNSUPPORTED.keys()
    assert not UNSUPPORTED.keys() & {*FAMILIES, *WRAPPERS}


def test_the_features_of_a_family_follow_from_its_layers() -> None:
    latent, whole, dense = (family_features(family) for family in ("kimi_k2", "minimax_m2", "llama"))
    assert (latent.tensor_parallel, latent.lora, latent.mtp) == ("yes", "feed-forward only", "yes")
    assert (whole.tensor_parallel, whole.expert_parallel, whole.lora, whole.mtp) == ("yes", "yes", "yes", "no")
    assert dense.expert_parallel.startswith("no: a llama model has no experts")


def test_without_an_argument_all_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == sorted([*FAMILIES, *WRAPPERS])
    code, out, _ = run(capsys, "--json")
    assert json.loads(out)["families"]["llama"]["features"]["expert_parallel"].startswith("no: ")
    assert run(capsys, "--markdown") == (0, family_table(), "")


def test_a_folder_is_reported_with_memory_features_and_what_is_not_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = demo_copy(tmp_path, attention_twist=2)
    code, out, _ = run(capsys, str(folder), "--json")
    report = json.loads(out)
    assert code == 0 and report["served"] and report["missing"] == []
    assert (report["family"], report["ignored_keys"]) == ("qwen3_moe", ["attention_twist"])
    config = json.loads((folder / "config.json").read_text())
    values = 2 * config["num_key_value_heads"] * config["head_dim"] * config["num_hidden_layers"]
    assert report["kv_bytes_per_token"] == 2 * values
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert abs(report["weight_bytes"] - stored) < 0.1 * stored
    _, out, _ = run(capsys, str(folder), "--kv-dtype", "fp8")
    assert f"KV cache: {values:,} bytes per token" in out
    assert "keys of config.json that are not read: attention_twist" in out


@pytest.mark.parametrize(
    ("absent", "message"), [("tokenizer.json", "has no tokenizer.json"), ("model.safetensors", "safetensors")]
)
def test_missing_files_of_a_model_folder_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, absent: str, message: str
) -> None:
    code, out, _ = run(capsys, str(demo_copy(tmp_path, without=absent)))
    assert code == 1
    (missing,) = [line for line in out.splitlines() if line.startswith("missing: ")]
    assert message in missing and "not complete" in out


def test_the_formats_that_a_chat_template_implies_are_named(tmp_path: Path) -> None:
    folder = demo_copy(tmp_path)
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}<tool_call></think>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    report = report_on(str(folder))
    assert (report.tool_format, report.reasoning_format) == ("hermes", "think")


def test_tensors_that_do_not_belong_to_the_configuration_are_named(tmp_path: Path) -> None:
    report = report_on(str(demo_copy(tmp_path, attention_bias=True)))
    assert len(report.missing) == 1 and "self_attn.k_proj.bias" in report.missing[0]


def test_a_configuration_alone_is_enough_for_memory_and_features(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}))
    code, out, _ = run(capsys, str(path))
    assert code == 0
    assert "served, family glm4_moe" in out and "mtp: yes" in out and "missing" not in out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; the known families are: afmoe"),
        ({"model_type": "hy_v3", "moe_router_use_sigmoid": False}, "moe_router_use_sigmoid False is not supported"),
        ({"model_type": "bert"}, "has an encoder, for embeddings"),
        ([1], "must be a JSON object"),
        ({}, "model family None is not supported"),
        ({"model_type": "mixtral", "hidden_size": -4}, "hidden_size -4 must be at least 1"),
        ({"model_type": "mixtral", "num_attention_heads": -8}, "num_attention_heads -8 must be at least 0"),
        ({"model_type": "mixtral", "vocab_size": "many"}, "invalid value"),
        (
            {"model_type": "mixtral", "quantization_config": {"quant_method": "hqq"}},
            "quantization HQQ is not supported",
        ),
    ],
)
def test_models_that_the_engine_does_not_serve_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Any, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run(capsys, str(tmp_path / "config.json"))
    assert code == 1 and message in err
    code, out, _ = run(capsys, str(tmp_path), "--json")
    assert code == 1 and json.loads(out)["served"] is False and message in " ".join(json.loads(out)["reason"].split())


def test_a_quantized_checkpoint_is_reported_in_the_format_of_its_weights(tmp_path: Path) -> None:
    path, settings = tmp_path / "config.json", {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    path.write_text(json.dumps({"model_type": "mixtral", "quantization_config": settings}))
    kept, wide = report_on(str(path)), report_on(str(path), weights="bf16")
    assert (kept.weight_format, kept.quantization) == ("int4", "GPTQ (4 bits, act-order (desc_act))")
    assert (wide.weight_format, wide.quantization) == ("bfloat16", kept.quantization)
    assert 3.5 < wide.weight_bytes / kept.weight_bytes < 4


def test_states_of_recurrent_layers_are_reported_for_each_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_next"}))
    code, out, _ = run(capsys, str(path))
    assert code == 0 and "recurrent states: 73.7 MiB per request" in out
    path.write_text(json.dumps({"model_type": "mixtral"}))
    assert "recurrent states" not in run(capsys, str(path))[1]


def test_a_gguf_file_is_reported_like_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gguf_checkpoints import Type, write_gguf
    from tests.model.conftest import write_checkpoint

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "plain").mkdir()
    write_checkpoint(tmp_path / "plain", "llama, llama3 rope of long models")
    write_gguf(tmp_path / "plain", tmp_path / "model.gguf", Type.F32)
    code, out, _ = run(capsys, str(tmp_path / "model.gguf"), "--json")
    report = json.loads(out)
    assert (report["family"], report["weight_format"]) == ("llama", "bfloat16")
    assert [line for line in report["missing"] if "tensor" in line or "lacks" in line] == []
    assert code == int(bool(report["missing"]))
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    code, _, err = run(capsys, str(tmp_path / "other.gguf"))
    assert code == 1 and "is not a complete GGUF file" in err


def test_a_folder_without_a_configuration_is_refused_with_advice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "has no config.json; give a checkpoint" in run(capsys, str(tmp_path))[2]
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    code, _, err = run(capsys, str(tmp_path))
    assert code == 1 and "give the path of model.gguf" in err


def test_a_file_of_another_name_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("{}")
    code, _, err = run(capsys, str(tmp_path / "model.bin"))
    assert code == 1 and "is not called config.json" in err


@pytest.mark.parametrize(
    ("family", "lora"),
    [("longcat_flash", "feed-forward only"), ("nemotron_h", "attention only"), ("falcon_h1", "yes"), ("jamba", "yes")],
)
def test_adapters_are_served_where_layers_on_disk_are_not_layers_here(family: str, lora: str) -> None:
    assert features_of(family_spec(family)).lora == lora
