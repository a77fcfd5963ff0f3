"""`moiety kernels`, as processes: with Triton, without it, and without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moiety_kernels

MOIETY = [sys.executable, "-m", "moiety_platform.cli"]


def run(*command: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([path, *sys.path])
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=250)


@pytest.mark.slow
def test_the_report_lists_what_every_variant_takes_and_why_one_does_not_compile(tmp_path: Path) -> None:
    """The package that is asked is ours, with the variants broken that add."""
    package = tmp_path / "moiety_kernels"
    shutil.copytree(Path(moiety_kernels.__file__).parent, package)
    kernel = package / "rms_norm" / "kernel.py"
    kernel.write_text(kernel.read_text().replace("x += tl.load(", "x += tl.no_such_load("), encoding="utf-8")
    done = run(*MOIETY, "kernels", "report", "rms_norm", "--target", "sm_90", "--json", path=str(tmp_path))
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["settings"] == {"targets": ["sm_90"], "operations": ["rms_norm"], "covering": False}
    assert report["environment"]["triton"] is not None
    assert len(report["rows"]) == 6
    for row in report["rows"]:
        if row["variant"].startswith("add_"):
            assert f"{row['variant']} does not compile for sm_90" in row["error"]
            assert "no_such_load" in row["error"]
        else:
            assert (row["error"], row["spill_bytes"]) == (None, 0)
            assert 16 <= row["registers"] <= 255


def test_kernel_commands_name_the_missing_triton_package(tmp_path: Path) -> None:
    hide = "import sys; sys.path = [one for one in sys.path if not one.endswith('-packages')] + [sys.argv.pop(1)]; "
    have = tmp_path / "some-packages-only"
    have.mkdir()
    for site in (Path(one) for one in sys.path if one.endswith("-packages")):
        for found in site.iterdir():
            if not found.name.startswith("triton"):
                (have / found.name).symlink_to(found)
    start = hide + "from moiety_platform.cli.main import main; main(sys.argv[1:])"
    for command in ("report", "tune"):
        done = run(sys.executable, "-c", start, str(have), "kernels", command)
        assert done.returncode == 1, done.stderr
        assert (
            done.stderr.strip() == "moiety kernels: this needs triton, which is not installed; run: pip install triton"
        )


def test_without_a_gpu_nothing_is_tuned() -> None:
    done = run(*MOIETY, "kernels", "tune", "--shapes", "OLMoE")
    if done.returncode:  # where there is a GPU, this tunes
        assert done.returncode == 1
        assert "torch sees no GPU here" in done.stderr


def test_a_layer_that_makes_no_sense_is_refused() -> None:
    done = run(*MOIETY, "kernels", "tune", "--layer", "8,16,128,128")
    assert done.returncode == 2
    assert "E,K,D,F" in done.stderr
