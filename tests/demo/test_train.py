"""A short run learns, is reproducible and leaves a loadable folder; the commands report what they did."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moiety_demo.cli import app
from moiety_demo.folder import load_folder
from moiety_demo.train import TrainProgress, TrainSettings, train

TINY = {"hidden_size": 32, "num_layers": 1, "num_experts": 4, "expert_hidden_size": 16, "head_dim": 16}
SETTINGS = TrainSettings(
    steps=12, threads=1, batch_tokens=800, warmup_steps=2, checkpoint_every=6, check_prompts=2, learning_rate=1e-2
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TrainProgress]]:
    path = tmp_path_factory.mktemp("model")
    seen: list[TrainProgress] = []
    train(path, SETTINGS, seen.append, TINY)
    return path, seen


def test_a_short_run_learns_and_reports_every_step(trained: tuple[Path, list[TrainProgress]]) -> None:
    _, seen = trained
    assert [progress.step for progress in seen] == list(range(1, 13))
    assert seen[-1].loss < seen[0].loss - 0.5
    assert seen[-1].fraction == 1.0
    assert [progress.step for progress in seen if progress.accuracy] == [6, 12]


def test_a_run_leaves_a_loadable_folder_and_nothing_partial(trained: tuple[Path, list[TrainProgress]]) -> None:
    path, _ = trained
    load_folder(path)
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_same_seed_gives_the_same_weights(trained: tuple[Path, list[TrainProgress]], tmp_path: Path) -> None:
    train(tmp_path, SETTINGS, lambda progress: None, TINY)
    assert (tmp_path / "model.safetensors").read_bytes() == (trained[0] / "model.safetensors").read_bytes()


def test_a_run_ends_when_its_minutes_are_spent(tmp_path: Path) -> None:
    settings = TrainSettings(steps=10**9, minutes=1e-9, threads=1, batch_tokens=200, check_prompts=0)
    assert train(tmp_path, settings, lambda progress: None, TINY).step == 1


def test_evaluate_prints_one_json_object(trained: tuple[Path, list[TrainProgress]]) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(trained[0]), "--per-domain", "3", "--threads", "1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["domains"]["lists"]["num_prompts"] == 3
    assert set(report) >= {"environment", "settings", "domains", "specialisation", "wall_s"}


def test_evaluate_prints_tables_for_people(trained: tuple[Path, list[TrainProgress]]) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(trained[0]), "--per-domain", "2", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "arithmetic" in result.stdout
    assert "Layer 0" in result.stdout


def test_evaluate_refuses_a_folder_that_is_no_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path)])
    assert result.exit_code == 2
    assert "not a complete model folder" in result.output


def test_sample_prints_tasks_of_one_domain() -> None:
    result = CliRunner().invoke(app, ["sample", "capitals", "--num", "4", "--held-out", "--json"])
    assert result.exit_code == 0, result.output
    tasks = json.loads(result.stdout)["tasks"]
    assert [task["domain"] for task in tasks] == ["capitals"] * 4


def test_sample_refuses_an_unknown_domain() -> None:
    result = CliRunner().invoke(app, ["sample", "astrology"])
    assert result.exit_code == 2
