"""`moiety plan` offers no layout that the engine refuses at its start, and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.spec import ModelSpec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.planning.attention_ffn import why_not_apart
from moiety_engine.planning.layouts import TrafficDemand, evaluate, list_layouts
from moiety_engine.planning.machines import GPUS, find_network
from moiety_engine.planning.models import find_model
from moiety_platform.cli.main import main

H200 = GPUS["h200"]
NETWORK = find_network("nvlink,ib400", H200, 8)
DEMAND = TrafficDemand(input_tokens=1000, output_tokens=500, ttft_s=100.0, tpot_s=10.0, gpu_hour_usd=2.0)
FAMILIES = {  # with stages that cannot begin with some layers, or parts that cannot be divided
    "falcon_h1": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared", "shared"] * 26},
    "longcat_flash": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 16},
}


def refusal(spec: ModelSpec, layout: Layout) -> str | None:
    """Why an engine with this layout does not start."""
    for rank in range(layout.num_ranks):
        try:
            own_spec(spec, RankPosition(layout, rank))
        except InvalidConfig as exc:
            return str(exc)
    return None


def folder_of(folder: Path, family: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": family} | FAMILIES[family]))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layout_that_the_engine_refuses_has_the_same_reason_in_the_plan(tmp_path: Path, family: str) -> None:
    served = find_model(str(folder_of(tmp_path, family)))
    refused = 0
    for layout in list_layouts(8, served.spec):
        found, reason = evaluate(served, layout, 8, H200, NETWORK, DEMAND), refusal(served.spec, layout)
        if not found.in_engine:
            continue  # shown as a layout that would need copies of experts
        if reason is not None:
            assert found.problem == reason
            refused += 1
        elif found.problem is not None:
            assert not any(words in found.problem for words in ("begins a stage", "cannot be divided"))
    assert (refused > 0) == (family != "granitemoehybrid"), "one group of its states is divided"


def test_a_model_without_expert_ranks_is_planned_and_the_reason_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, "longcat_flash")
    with pytest.raises(SystemExit) as done:
        main(["plan", "--model", str(folder), "--gpus", "8", "--gpu", "b200", "--input-tokens", "500"])
    assert done.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    reason = why_not_apart(find_model(str(folder)).spec)
    assert reason.startswith(
        "--ffn-ranks is not available for longcat_flash, which adds the output of experts one layer"
    )
    assert f"Attention–FFN disaggregation is not available: {reason}." in said
    assert "layouts are ruled out" in said
