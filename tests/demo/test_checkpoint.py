"""The bundled model: small enough to bundle, right in every domain, specialised, and good at chat."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moiety_demo import checkpoint_path
from moiety_demo.domains import DOMAINS
from moiety_demo.evaluate import EvaluationReport, evaluate, measure_specialisation
from moiety_demo.folder import load_folder
from moiety_demo.tokenizer import build_tokenizer, render_prompt

MAX_BYTES = 11_000_000


@pytest.fixture(scope="module")
def report() -> Iterator[EvaluationReport]:
    """Run one evaluation on one thread: a model this small is not faster on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield evaluate(checkpoint_path(), per_domain=40, seed=99)
    torch.set_num_threads(threads)


def test_it_fits_into_the_wheel() -> None:
    assert sum(file.stat().st_size for file in checkpoint_path().iterdir()) <= MAX_BYTES


@pytest.mark.parametrize("domain", DOMAINS)
def test_it_answers_held_out_prompts_of_every_domain(report: EvaluationReport, domain: str) -> None:
    assert report.domains[domain].accuracy >= 0.9, report.domains[domain].mistakes


def test_its_experts_specialise_by_domain(report: EvaluationReport) -> None:
    assert max(report.specialisation.mutual_information_bits) > 0.3
    assert max(report.specialisation.total_variation) > 0.25


def test_few_experts_are_idle(report: EvaluationReport) -> None:
    counts = torch.tensor([result.expert_counts for result in report.domains.values()]).sum(0)
    in_use = counts / counts.sum(-1, keepdim=True) > 0.005
    assert in_use.float().mean() >= 0.85


def test_its_tokenizer_is_the_one_that_the_present_data_gives() -> None:
    _, bundled = load_folder(checkpoint_path())
    assert json.loads(bundled.to_str()) == json.loads(build_tokenizer().to_str())


def test_its_tokenizer_takes_digits_one_by_one_and_loses_no_text() -> None:
    _, bundled = load_folder(checkpoint_path())
    assert len(bundled.encode("4071").ids) == 4
    assert bundled.decode(bundled.encode("naïve 東京 \t 🙂").ids) == "naïve 東京 \t 🙂"


@torch.inference_mode()
def test_it_answers_in_the_second_turn_after_a_system_message() -> None:
    network, tokenizer = load_folder(checkpoint_path())
    messages = [
        ("system", "You are a helpful assistant."),
        ("user", "Is 75 odd or even?"),
        ("assistant", "It ends in 5, so it is odd."),
        ("user", 'What is the last letter of "moiety"?'),
    ]
    hidden, _ = network([torch.tensor([tokenizer.encode(render_prompt(messages)).ids])])
    assert tokenizer.decode([int(network.logits(hidden[-1:]).argmax())]) == "y"


def test_specialisation_is_zero_for_equal_use_and_largest_for_disjoint_use() -> None:
    alike = measure_specialisation([[[3, 1]], [[30, 10]]])
    assert alike.mutual_information_bits == pytest.approx([0.0], abs=1e-9)
    assert alike.total_variation == pytest.approx([0.0], abs=1e-9)
    disjoint = measure_specialisation([[[5, 0]], [[0, 2]]])
    assert disjoint.mutual_information_bits == pytest.approx([1.0])
    assert disjoint.total_variation == pytest.approx([0.5])


def test_the_folder_is_a_complete_hugging_face_folder() -> None:
    names = {file.name for file in Path(checkpoint_path()).iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert "tokenizer_config.json" in names
