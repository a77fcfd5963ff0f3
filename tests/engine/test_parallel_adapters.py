"""Adapters over several ranks: many adapters in one batch answer as on one rank, and no rank is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_engine.adapters.dummy import ATTENTION, write_adapter
from moiety_engine.config import EngineConfig
from moiety_engine.messages import CoreSubmit
from moiety_wire.messages import Sampling

from .rank_processes import RankProcesses, assert_same, ranks_of, requests, settings_of, thorough

EXPERTS = ("gate_proj", "up_proj", "down_proj")
MODULES = {"qwen3_moe": EXPERTS, "mixtral": ("w1", "w2", "w3"), "qwen3_next": EXPERTS}
NAMES = ("", "attention", "everything", "experts")
Adapters = dict[str, str]


def requests_of(num_tokens: int) -> list[list[CoreSubmit]]:
    """Return requests; answers of 20 tokens and more consist of three tokens, so that drafts by look-up are right."""
    found = requests(num_tokens)
    if num_tokens < 20:
        return found
    few = Sampling(temperature=0.0, num_logprobs=2, logit_bias=dict.fromkeys((17, 230, 41), 30.0))
    return [[msgspec.structs.replace(one, sampling=few) for one in wave if not one.embed] for wave in found]


def waves(num_tokens: int = 6) -> list[list[CoreSubmit]]:
    """Return requests with adapters and without; those of neighbouring keys have other adapters."""
    return [
        [msgspec.structs.replace(one, adapter=NAMES[one.key % len(NAMES)]) for one in wave]
        for wave in requests_of(num_tokens)
    ]


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapters]:
    """Folders of adapters by family and name."""

    def of(family: str) -> Adapters:
        into, checkpoint, experts = tmp_path_factory.mktemp("adapters"), folders[family], MODULES[family]
        found = {
            "attention": write_adapter(into / "attention", checkpoint, seed=1),
            "everything": write_adapter(into / "everything", checkpoint, modules=ATTENTION + experts, rank=6, seed=2),
            "experts": write_adapter(into / "experts", checkpoint, modules=experts, rank=2, seed=3, use_rslora=True),
        }
        return {name: str(folder) for name, folder in found.items()}

    return {family: of(family) for family in MODULES}


class AdapterRuns:
    """Runs with adapters: on one rank, whose answers are kept, and on several."""

    def __init__(self, processes: RankProcesses, folders: dict[str, Path], adapters: dict[str, Adapters]) -> None:
        self._processes, self.folders, self.adapters = processes, folders, adapters
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    def on_one(self, family: str, num_tokens: int = 6) -> dict[str, Any]:
        if (family, num_tokens) not in self._known:
            config = settings_of(self.folders[family], adapters=self.adapters[family])
            (found,) = self._processes.work(*ranks_of(config), waves=waves(num_tokens))
            (plain,) = self._processes.work(*ranks_of(settings_of(self.folders[family])), waves=requests_of(num_tokens))
            assert not found["error"]
            differ = [key for key, tokens in found["token_ids"].items() if tokens != plain["token_ids"][key]]
            assert len(differ) > 5 and not any(int(key) % len(NAMES) == 0 for key in differ)
            self._known[family, num_tokens] = found
        return self._known[family, num_tokens]

    def on_several(self, config: EngineConfig, **options: Any) -> dict[str, Any]:
        """Return the answers of the first rank; no other one may fail."""
        ours, *others = self._processes.work(*ranks_of(config), **options)
        assert not any(other["error"] for other in others)
        return ours


@pytest.fixture(scope="module")
def runs(processes: RankProcesses, folders: dict[str, Path], adapters: dict[str, Adapters]) -> AdapterRuns:
    return AdapterRuns(processes, folders, adapters)


LAYOUTS: list[Any] = [
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
    ("qwen3_moe", {"dp_attention": 2, "ep": 2}),
    ("qwen3_moe", {"pp": 2}),
    ("qwen3_moe", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batch_tokens": 2}),
    ("mixtral", {"dp_attention": 2, "tp": 2, "ep": 2}),
    ("qwen3_next", {"tp": 2, "ep": 2}),  # with shared experts
    ("qwen3_next", {"dp_attention": 2, "ffn_ranks": 2, "ep": 2, "micro_batch_tokens": 2}),
    thorough("qwen3_next", {"dp_attention": 2, "ep": 2}),
    ("qwen3_moe", {"tp": 4, "decode_context_parallel": 2}),
    thorough("qwen3_moe", {"tp": 4, "ep": 2, "decode_context_parallel": 2}),
    thorough("qwen3_moe", {"prefill_context_parallel": 2, "ep": 2}),
    thorough("mixtral", {"tp": 4}),  # more ranks than key-value heads
    thorough("mixtral", {"tp": 4, "ep": 2}),
    thorough("mixtral", {"tp": 2, "ffn_ranks": 2, "ep": 1}),
    thorough("qwen3_moe", {"pp": 2, "ffn_ranks": 2}),
    thorough("qwen3_moe", {"dp_attention": 2, "ep": 2, "pp": 2}),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_adapters_on_several_ranks_answer_as_on_one(runs: AdapterRuns, family: str, layout: dict[str, Any]) -> None:
    expected, given = runs.on_one(family), runs.adapters[family]
    first = {"attention": given["attention"]}  # the others are registered while the engine serves
    config = settings_of(runs.folders[family], adapters=first, max_adapters=2, **layout)
    ours = runs.on_several(config, waves=waves(), adapters=given)
    assert_same(expected, ours)
    assert ours["num_evictions"] > 0 and ours["num_slots"] == 2
    assert ours["num_cached"] > 0


OPTIONS: list[Any] = [
    ({"dp_attention": 2, "ep": 2}, {}),  # requests are preempted
    thorough({"tp": 2}, {}),
    ({"tp": 2, "ep": 2}, {"speculate": "ngram", "batch_invariant": True}),
    ({"dp_attention": 2, "ep": 2}, {"overlap": "on", "host_kv_memory_bytes": 1 << 20, "naps": True}),
    ({"pp": 2}, {"speculate": "ngram", "overlap": "on"}),
    thorough({"ffn_ranks": 1}, {"speculate": "ngram", "overlap": "on", "naps": True}),
    thorough({"dp_attention": 2, "ep": 2}, {"batch_invariant": True, "speculate": "ngram"}),
]


@pytest.mark.parametrize(("layout", "more"), OPTIONS, ids=str)
def test_adapters_on_several_ranks_beside_other_options_answer_as_on_one(
    runs: AdapterRuns, layout: dict[str, int], more: dict[str, Any]
) -> None:
    num_tokens = 20 if "speculate" in more else 10
    expected = runs.on_one("qwen3_moe", num_tokens)
    options = {name: value for name, value in more.items() if name != "naps"}
    config = settings_of(runs.folders["qwen3_moe"], adapters=runs.adapters["qwen3_moe"], **layout, **options)
    naps = "naps" in more
    ours = runs.on_several(config, waves=waves(num_tokens), naps=naps, hurries=0.0 if naps else 0.01)
    assert_same(expected, ours)
    assert more or ours["num_recomputed"] > 0
    assert "speculate" not in more or ours["num_accepted"] > 0
    assert "host_kv_memory_bytes" not in more or ours["num_swapped"] > 0


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "ep": 2}, {"dp_attention": 2, "ep": 2}, thorough({"dp_attention": 2, "ffn_ranks": 2, "ep": 2})],
    ids=str,
)
def test_adapters_of_experts_move_with_them(runs: AdapterRuns, layout: dict[str, int]) -> None:
    moving = {"redundant_experts": 2, "rebalance_every_s": 5.0, "max_adapters": 2}  # slots are filled after moves too
    config = settings_of(runs.folders["qwen3_moe"], **layout, **moving)
    given = runs.adapters["qwen3_moe"]
    ours = runs.on_several(config, waves=waves(10), adapters=given, shuffles=True)
    assert_same(runs.on_one("qwen3_moe", num_tokens=10), ours)
    assert ours["moves"]["bytes"] > 0 and ours["num_evictions"] > 0


@pytest.mark.parametrize(
    ("layout", "lacks"),
    [({"tp": 2}, "slots"), ({"tp": 2}, "parts"), thorough({"ffn_ranks": 1}, "slots")],  # of which another rank has none
    ids=str,
)
def test_an_adapter_that_another_rank_cannot_load_is_refused_on_all_and_served_once_it_can(
    runs: AdapterRuns, layout: dict[str, int], lacks: str
) -> None:
    expected, given = runs.on_one("qwen3_moe"), runs.adapters["qwen3_moe"]
    config = settings_of(runs.folders["qwen3_moe"], **layout)
    asked = [one for wave in waves() for one in wave]
    wave = [one for one in asked if one.adapter in ("", "everything") and not one.embed]
    again = [msgspec.structs.replace(one, key=100 + one.key) for one in wave]
    ours = runs.on_several(config, waves=[wave, again], adapters=given, lacks=lacks, some_fail=True)
    assert not ours["error"]
    refused = {str(one.key) for one in wave if one.adapter}
    assert ours["failed"] == dict.fromkeys(refused, "adapter_refused")
    assert all("another rank is out of memory" in reason for reason in ours["reasons"].values())
    answered = {str(one.key) for one in wave} - refused
    assert {key: ours["token_ids"][key] for key in answered} == {key: expected["token_ids"][key] for key in answered}
    for one in again:
        assert ours["token_ids"][str(one.key)] == expected["token_ids"][str(one.key - 100)]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"ffn_ranks": 1}], ids=str)
def test_an_adapter_that_does_not_fit_one_of_the_ranks_ends_the_start_with_the_reason_on_all(
    processes: RankProcesses, folders: dict[str, Path], tmp_path: Path, layout: dict[str, int]
) -> None:
    """The adapter modifies only experts of the last layer, which the first rank does not hold."""
    from safetensors.torch import load_file, save_file

    folder = write_adapter(tmp_path / "last", folders["qwen3_moe"], modules=EXPERTS)
    path = folder / "adapter_model.safetensors"
    last = {name: tensor for name, tensor in load_file(path).items() if ".layers.2.mlp.experts." in name}
    save_file(last, path)
    config = settings_of(folders["qwen3_moe"], adapters={"last": str(folder)}, adapter_memory_bytes=1000, **layout)
    with pytest.raises(AssertionError, match=r'"rank": 1, "reason": "adapter \'last\'.*--adapter-memory-bytes 1000'):
        processes.work(*ranks_of(config), waves=requests())


def test_a_rank_that_ends_while_an_adapter_is_loaded_ends_the_group(
    processes: RankProcesses, folders: dict[str, Path], adapters: dict[str, Adapters]
) -> None:
    config = settings_of(folders["qwen3_moe"], tp=2)
    with pytest.raises(AssertionError, match=r"rank 1 .*rank_lost"):
        processes.work(*ranks_of(config), waves=waves(), adapters=adapters["qwen3_moe"], lacks="itself")
