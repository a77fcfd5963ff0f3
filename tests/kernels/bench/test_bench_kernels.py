"""`moiety bench kernels` on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moiety_platform.cli.main import main

FIELDS = {"kernel", "shape", "tokens", "routing", "dtype", "time_us", "tflops", "gb_per_s", "roofline_fraction"}


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moiety_platform.cli", "bench", "kernels", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


@pytest.mark.parametrize(
    "kernels",
    [
        ["moe_layer", "rms_norm"],
        ["kimi_delta_decode", "mamba2_decode", "lightning_attention_decode"],
        pytest.param(["moe_layer_fp8", "moe_layer_mxfp4", "paged_attention_decode"], marks=pytest.mark.thorough),
    ],
    ids=["bf16", "recurrences", "other kernels"],
)
def test_rows_have_times_rivals_and_fractions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kernels: list[str]
) -> None:
    output = tmp_path / "kernels.json"
    command = ["bench", "kernels", "--device", "cpu", "--shapes", "moiety-demo", "--tokens", "2", "--routing", "zipf"]
    command += ["--threads", "1", "--kernels", ",".join(kernels), "--time-budget-s", "240"]
    with pytest.raises(SystemExit) as ended:  # in this process, which has imported transformers for other tests
        main([*command, "--json", "--output", str(output)])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text())
    assert report["skipped"] == []
    assert report["environment"]["device"] == "cpu"
    assert report["roofline"]["source"] == "measured in this run"
    assert [row["kernel"] for row in report["rows"]] == kernels
    for row in report["rows"]:
        assert set(row) >= FIELDS
        assert row["rivals_failed"] == {}
        assert min(row["time_us"], row["gb_per_s"], row["roofline_fraction"], *row["rivals"].values()) > 0
    if kernels[0] == "moe_layer":
        check_layer(report["rows"][0])


def check_layer(layer: dict[str, Any]) -> None:
    assert set(layer["rivals"]) >= {"torch_grouped_mm", "torch_batched", "transformers_grouped_mm"}
    assert layer["difference"] < 0.02  # of what torch's composition in bfloat16 makes of the same
    assert 2 <= layer["active_experts"] <= 4


def test_without_memory_or_time_points_are_named_not_dropped() -> None:
    done = bench(*("--device", "cpu", "--kernels", "moe_layer", "--shapes", "DeepSeek-V3,moiety-demo", "--tokens", "1"),
                 *("--routing", "uniform", "--time-budget-s", "1", "--no-rivals"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not measured: moe_layer of DeepSeek-V3 at 1" in done.stdout


def test_unknown_names_are_refused_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "kernels", "--shapes", "gpt-5", "--device", "cpu"])
    assert ended.value.code == 2
    assert "gpt-oss-20b" in capsys.readouterr().err
