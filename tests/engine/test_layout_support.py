"""Features on layouts of ranks: the page has what the engine's checks answer, and each combination that is available
gives the answers of one rank, on ranks in real processes.

Features with a checkpoint or a harness of their own are run elsewhere: `ELSEWHERE` has the tests and their cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moiety_demo
from moiety_engine.config import EngineConfig
from moiety_engine.messages import CoreSubmit
from moiety_engine.planning.layout_support import FEATURES, LAYOUTS, layout_table, why_unavailable
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.classes import STANDARD
from moiety_wire.grammars import GrammarKind, GrammarSpec
from moiety_wire.messages import Sampling

from . import test_parallel_adapters as adapters
from . import test_parallel_disk as disk
from . import test_parallel_drafts as drafts
from . import test_parallel_failures as failures
from . import test_parallel_images as images
from . import test_parallel_offload as offload
from . import test_parallel_transfer as transfer
from .rank_processes import RankProcesses, assert_same, ranks_of
from .test_expert_scaling import SCALED
from .test_parallel import NARROW_LAYOUTS

TESTS = Path(__file__).parent.parent
ELSEWHERE: dict[str, tuple[str, list[Any]]] = {  # where a combination that is available is run, and the cases
    "Images": ("engine/test_parallel_images.py", images.LAYOUTS),
    "MTP speculation": ("engine/test_parallel_drafts.py", drafts.MTP_LAYOUTS + drafts.MTP_DIVIDED),
    "Disaggregated prefill and decode": ("engine/test_parallel_transfer.py", transfer.OVER_RANKS),
    "KV transfer from other engines": ("engine/test_parallel_transfer.py", transfer.OVER_RANKS),
    "LoRA adapters": ("engine/test_parallel_adapters.py", adapters.LAYOUTS),
    "Disk cache": ("engine/test_parallel_disk.py", disk.OVER_RANKS),
    "Expert offloading": ("engine/test_parallel_offload.py", offload.LAYOUTS),
    "CUDA graphs": ("engine/test_graphs.py", []),
    "Recorded decode steps on a CPU": ("model/test_head.py", []),
    "int8, int4 and fp8 weights": ("engine/test_parallel.py", NARROW_LAYOUTS),
    "Exclusion of failed ranks": ("engine/test_parallel_failures.py", failures.EXCLUDED),
    "Adding and removing expert ranks": ("engine/test_expert_scaling.py", SCALED),
}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
GRAMMAR = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA | {"additionalProperties": False}))
CELLS = [
    (feature, layout)
    for feature in FEATURES
    for layout in LAYOUTS
    if LAYOUTS[layout] and feature not in ELSEWHERE and not why_unavailable(feature, layout)
]


def settings_of(layout: str = "1 rank", feature: str = "Continuous batching, chunked prefill") -> EngineConfig:
    settings: dict[str, Any] = {"block_size": 4, "max_batch_tokens": 32, "max_running": 8, "kv_memory_bytes": 1 << 20}
    settings |= {"model": str(moiety_demo.checkpoint_path()), "name": "demo", "device": "cpu", "dtype": "float32"}
    settings |= LAYOUTS[layout] | FEATURES[feature].settings
    if feature == "Draft-model speculation":
        settings["draft_model"] = settings["model"]
    return EngineConfig(**settings)


def waves_for(feature: str) -> list[list[CoreSubmit]]:
    text = read_text_model(moiety_demo.checkpoint_path())
    tokenizer = Tokenizer.from_json(text.tokenizer_json)
    questions = ["What is 7 times 6?", "Count from 1 to 9 and back. " * 3, "Name a colour."]

    def ask(key: int, question: str, **more: Any) -> CoreSubmit:
        prompt, sampling = tokenizer.encode(question), Sampling(temperature=0.0, num_logprobs=2)
        submit = CoreSubmit(key, "t", STANDARD, prompt, sampling, 12, 0, [], 12, b"s", 0)
        return msgspec.structs.replace(submit, **more)

    if feature == "Structured outputs":
        eos = list(text.eos_token_ids)
        return [[ask(key, one, grammar=GRAMMAR, stop_token_ids=eos) for key, one in enumerate(questions)]]
    first = [ask(key, one) for key, one in enumerate(questions)]
    if feature == "Embeddings":
        first.append(ask(9, questions[1], embed=True, max_tokens=0, credit_tokens=0))
    return [first, [ask(4, questions[1]), ask(5, questions[0] + questions[1])]]


def work_of(feature: str) -> dict[str, Any]:
    """Return what the ranks' processes are asked to do in addition to the requests."""
    more: dict[str, Any] = {"waves": waves_for(feature), "hurries": 0.01, "exact": True}
    if feature == "Sleep mode":
        more["naps"] = True
    if feature == "Redundant experts, online rebalancing":
        more["shuffles"] = True
    return more


@pytest.fixture(scope="module")
def alone(processes: RankProcesses) -> dict[str, Any]:
    """Answers of one rank, by kind of requests."""
    return {}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [layout for feature, layout in CELLS if feature == "Batch invariance"])
def test_bits_do_not_depend_on_the_batch_on_several_ranks(processes: RankProcesses, layout: str) -> None:
    together = waves_for("Batch invariance")[0]
    by_itself = [[msgspec.structs.replace(one, key=100 + one.key)] for one in together]
    config = settings_of(layout, "Batch invariance")
    ours, *_ = processes.work(*ranks_of(config), waves=[together, *by_itself])
    assert not ours["error"]
    for one in together:
        alone, beside = str(100 + one.key), str(one.key)  # JSON has strings as keys
        assert ours["token_ids"][alone] == ours["token_ids"][beside]
        assert ours["best"][alone] == ours["best"][beside], "other bits in another batch"


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("feature", "layout"), CELLS, ids=str)
def test_a_feature_on_several_ranks_answers_as_on_one(
    processes: RankProcesses, alone: dict[str, Any], feature: str, layout: str
) -> None:
    kind = feature if feature in ("Structured outputs", "Embeddings") else ""
    if kind not in alone:
        plain = settings_of(feature=feature) if kind else settings_of()
        (alone[kind],) = processes.work(*ranks_of(plain), waves=waves_for(feature), exact=True)
    config = settings_of(layout, feature)
    ours, *others = processes.work(*ranks_of(config), **work_of(feature))
    assert_same(alone[kind], ours)
    assert not any(other["error"] for other in others)
    assert "speculation" not in feature or ours["num_accepted"] > 0
    assert feature != "Prefix cache" or ours["num_cached"] > 0
    assert feature != "Embeddings" or ours["vectors"]
    assert feature != "Redundant experts, online rebalancing" or ours["moves"]["bytes"] > 0


def test_the_page_has_the_tables_of_the_engines_checks() -> None:
    page = (TESTS.parent / "docs" / "layouts.md").read_text(encoding="utf-8")
    assert layout_table() in page, "write it anew: moiety models --layouts"


def test_each_available_combination_is_run_here_or_in_a_test_that_is_named() -> None:
    run_here = {feature for feature, _ in CELLS}
    assert not run_here & ELSEWHERE.keys()
    assert run_here | ELSEWHERE.keys() == FEATURES.keys()
    assert all((TESTS / path).is_file() for path, _ in ELSEWHERE.values())


@pytest.mark.parametrize("feature", ELSEWHERE)
def test_the_cases_of_a_test_that_is_named_have_each_available_layout(feature: str) -> None:
    _, cases = ELSEWHERE[feature]
    values = [value for case in cases for value in values_of(case)]
    layouts = [LAYOUTS.get(value, {}) if isinstance(value, str) else value for value in values]
    ran = [layout for layout in layouts if isinstance(layout, dict)]
    available = [name for name in LAYOUTS if LAYOUTS[name] and not why_unavailable(feature, name)]
    assert [name for name in available if not any(LAYOUTS[name].items() <= one.items() for one in ran)] == []


def values_of(case: Any) -> tuple[Any, ...]:
    """Return the parameters of a case."""
    return (case,) if isinstance(case, dict | str) else tuple(getattr(case, "values", case))


@pytest.mark.parametrize("feature", FEATURES)
def test_a_combination_that_is_refused_says_which_option_to_leave_out(feature: str) -> None:
    reasons = {why_unavailable(feature, layout) for layout in LAYOUTS} - {"", FEATURES[feature].one_rank}
    assert all("--" in reason and ":" in reason for reason in reasons)
