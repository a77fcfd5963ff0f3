"""Many adapters in one batch: each request's answer is that of its merged checkpoint alone."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moiety_engine.adapters import adapter_slots
from moiety_engine.adapters.dummy import ATTENTION, write_adapter
from moiety_engine.adapters.peft import TENSORS, read_adapter
from moiety_engine.config import EngineConfig, PolicyName
from moiety_engine.errors import AdapterError
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.model.adapter_modules import rank_factors
from moiety_engine.model.adapter_stacks import Product, form_of
from moiety_engine.model.families import spec_from_config
from moiety_engine.model.families.catalog import CATALOG
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

from .conftest import write_model

LENGTHS = (5, 23, 40, 9, 61, 17)
NUM_OUTPUT = 12


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
    return write_model(tmp_path_factory.mktemp("mixtral"), "mixtral", 1, settings | {"sliding_window": None})


FAMILIES = {"checkpoint": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w2", "w3")}


def make_submit(key: int, adapter: str = "", length: int = 20, max_tokens: int = NUM_OUTPUT) -> CoreSubmit:
    prompt = [3 + (7 * i + length) % 300 for i in range(length)]  # the same for all adapters: no cache may be shared
    asked = Sampling(temperature=0.0, num_logprobs=1)
    return CoreSubmit(
        key, "t", STANDARD, prompt, asked, max_tokens, 0, [], max_tokens, b"s", time.time_ns(), adapter=adapter
    )


def merge(checkpoint: Path, adapter: Path, into: Path) -> Path:
    """The checkpoint with W + scale · B · A in the place of each W."""
    shutil.copytree(checkpoint, into)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** (0.5 if config["use_rslora"] else 1))
    weights, factors = load_file(checkpoint / "model.safetensors"), load_file(adapter / TENSORS)
    for name in [name for name in factors if name.endswith(".lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weights[f"{module}.weight"] += scale * factors[name.replace("lora_A", "lora_B")] @ factors[name]
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def by_transformers(folder: Path, submits: list[CoreSubmit]) -> dict[int, list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = {}
    for submit in submits:
        ids = torch.tensor([submit.prompt_ids])
        found = model.generate(ids, max_new_tokens=NUM_OUTPUT, do_sample=False, eos_token_id=None)
        answers[submit.key] = list(found[0, ids.shape[1] :].tolist())
    return answers


def adapters_of(folder: Path, checkpoint: Path, experts: tuple[str, ...]) -> dict[str, Path]:
    return {
        "attention": write_adapter(folder / "attention", checkpoint, seed=1),
        "everything": write_adapter(folder / "everything", checkpoint, modules=ATTENTION + experts, rank=6, seed=2),
        "experts": write_adapter(folder / "experts", checkpoint, modules=experts, rank=2, seed=3, use_rslora=True),
        "ups": write_adapter(folder / "ups", checkpoint, modules=(experts[-1],), rank=4, alpha=3.0, seed=4),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_each_answer_in_a_batch_of_many_adapters_is_that_of_its_merged_checkpoint(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    checkpoint: Path = request.getfixturevalue(family)
    adapters = adapters_of(tmp_path, checkpoint, FAMILIES[family])
    merged = {name: merge(checkpoint, folder, tmp_path / f"merged-{name}") for name, folder in adapters.items()}
    names = ["", *adapters]
    submits = [
        make_submit(key, names[key % len(names)], LENGTHS[key % len(LENGTHS)]) for key in range(1, 2 * len(names) + 1)
    ]
    given = {name: str(folder) for name, folder in adapters.items()}
    settings: dict[str, Any] = {"model": str(checkpoint), "name": "tiny", "dtype": "float32", "adapters": given}
    expected: dict[int, list[int]] = {}
    for name in names:
        own = [one for one in submits if one.adapter == name]
        expected |= by_transformers(merged.get(name, checkpoint), own)
    loop = load_loop(EngineConfig(**settings))
    found = run_all(loop, submits)
    assert {key: one.token_ids for key, one in found.items()} == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > len(names)  # the adapters change the output

    block_bytes = loop.executor.model.kv_bytes_per_block(4)
    few = EngineConfig(
        **settings, kv_memory_bytes=40 * block_bytes, block_size=4, max_batch_tokens=24, max_running=6,
        policy=PolicyName.FCFS, prefix_caching=False,
    )  # fmt: skip
    squeezed = run_all(build_loop(loop.executor.model, few), submits)
    assert {key: one.token_ids for key, one in squeezed.items()} == expected
    assert sum(one.finish.num_recomputed_tokens for one in squeezed.values() if one.finish) > 0


@pytest.mark.parametrize(
    ("variant", "further"),
    [
        ("qwen3_next", ("q_proj",)),
        pytest.param("laguna", ("g_proj",), marks=pytest.mark.thorough),
        ("lfm2_moe", ("w1", "w2", "w3")),
        ("dbrx", ("Wqkv",)),
        ("nemotron_h", ()),  # attention is a layer of its own, between two others
        ("falcon_h1", ("gate_proj", "up_proj", "down_proj")),  # with multipliers
        ("dots1", ("gate_proj", "up_proj", "down_proj")),  # of routed and of shared experts
        ("qwen3_next", ("gate_proj", "up_proj", "down_proj")),  # and with a gate of shared experts
        pytest.param("hunyuan_v1_moe", ("gate_proj", "up_proj", "down_proj"), marks=pytest.mark.thorough),
    ],
)
def test_adapters_on_queries_output_gates_and_modules_of_other_names_answer_as_the_merged_checkpoint(
    tmp_path: Path, variant: str, further: tuple[str, ...]
) -> None:
    from tests.model.conftest import write_checkpoint

    checkpoint = tmp_path / "base"
    write_checkpoint(checkpoint, variant)
    adapter = write_adapter(tmp_path / "adapter", checkpoint, modules=(*ATTENTION, *further), rank=3)
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    settings: dict[str, Any] = {"name": "tiny", "dtype": "float32", "block_size": 4, "max_running": 4}
    submits = [make_submit(1, "own", 40), make_submit(2, "", 23)]
    loop = load_loop(EngineConfig(model=str(checkpoint), adapters={"own": str(adapter)}, **settings))
    found = run_all(loop, submits)
    expected = run_all(load_loop(EngineConfig(model=str(merged), **settings)), [make_submit(1, "", 40)])
    assert found[1].token_ids == expected[1].token_ids
    plain = run_all(loop, [make_submit(3, "", 40), make_submit(4, "", 23)])
    assert found[1].token_ids != plain[3].token_ids
    assert found[2].token_ids == plain[4].token_ids


@pytest.mark.parametrize("only", [None, ".mlps.0.", ".mlps.1."])
def test_adapters_on_experts_whose_output_is_added_later_answer_as_the_merged_checkpoint(
    tmp_path: Path, only: str | None
) -> None:
    """In LongCat-Flash two layers are one on disk, and the first one has a dense feed-forward beside the experts."""
    from tests.model.conftest import write_checkpoint

    checkpoint = tmp_path / "base"
    write_checkpoint(checkpoint, "longcat_flash")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, modules=("gate_proj", "up_proj", "down_proj"), rank=3)
    zero_experts = tuple(f".experts.{expert}." for expert in (6, 7, 8))  # have weights in this file only
    stored = load_file(adapter / TENSORS)
    tensors = {name: a for name, a in stored.items() if not any(one in name for one in zero_experts)}
    if only is not None:
        tensors = {name: a for name, a in tensors.items() if only in name}
    assert any((only or ".mlps.0.") in name for name in tensors)
    save_file(tensors, adapter / TENSORS)
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    settings: dict[str, Any] = {"name": "tiny", "dtype": "float32", "block_size": 4, "max_running": 4}
    loop = load_loop(EngineConfig(model=str(checkpoint), adapters={"own": str(adapter)}, **settings))
    found = run_all(loop, [make_submit(1, "own", 40), make_submit(2, "", 23)])
    expected = run_all(load_loop(EngineConfig(model=str(merged), **settings)), [make_submit(1, "", 40)])
    plain = run_all(loop, [make_submit(3, "", 40), make_submit(4, "", 23)])
    assert found[1].token_ids == expected[1].token_ids != plain[3].token_ids
    assert found[2].token_ids == plain[4].token_ids


@pytest.fixture(scope="module")
def many(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {f"a{i}": write_adapter(folder / f"a{i}", checkpoint, seed=i) for i in range(5)}


def finish(loop: EngineLoop, num_open: int, deadline_s: float = 60.0) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Run steps until this many requests have ended; return tokens and failures by key."""
    tokens: dict[int, list[int]] = {}
    failed: dict[int, str] = {}
    end, ended = time.monotonic() + deadline_s, 0
    while ended < num_open:
        assert time.monotonic() < end, f"{num_open - ended} requests do not end"
        loop.step()
        step = loop.take_outputs()
        for output in step.outputs if step else ():
            tokens.setdefault(output.key, []).extend(output.token_ids)
            ended += output.finish is not None
        for failure in step.failures if step else ():
            failed[failure.key] = f"{failure.code}: {failure.message}"
            ended += 1
    return tokens, failed


def test_more_adapters_than_there_is_room_for_take_turns(loops: Any, many: dict[str, Path]) -> None:
    alone = {}
    for key, name in enumerate(many, 1):
        loop = loops.make(adapters={name: str(many[name])})
        alone[key] = run_all(loop, [make_submit(key, name)])[key].token_ids
    loop = loops.make(max_adapters=2)
    for name, folder in many.items():
        loop.intake.adapters.learn(name, folder)
    for turn in (0, 10):  # the second time some must come back
        for key, name in enumerate(many, 1):
            loop.submit(make_submit(turn + key, name))
        tokens, failed = finish(loop, len(many))
        assert {key - turn: found for key, found in tokens.items()} == alone
        assert not failed
    assert len(loop.intake.adapters.slots) == 2
    assert loop.intake.adapters.evictions_total >= 2 * len(many) - 4


def test_memory_for_adapters_is_a_bound_that_is_kept(loops: Any, checkpoint: Path, tmp_path: Path) -> None:
    small = {f"s{i}": write_adapter(tmp_path / f"s{i}", checkpoint, seed=i, rank=4) for i in range(3)}
    large = write_adapter(tmp_path / "large", checkpoint, seed=9, rank=16)
    one_large = loops.model.adapters.num_bytes(
        {(layer, product) for layer in (0, 1) for product in (Product.QKV, Product.OUTPUT)}, 1, 16
    )
    loop = loops.make(adapter_memory_bytes=one_large, adapters={name: str(path) for name, path in small.items()})
    assert len(loop.intake.adapters.slots) == 3
    loop.intake.adapters.learn("large", large)
    loop.intake.adapters.learn("too large", write_adapter(tmp_path / "too", checkpoint, rank=17))
    for key, name in enumerate(("s0", "large", "s1", "too large"), 1):
        loop.submit(make_submit(key, name))
    tokens, failed = finish(loop, 4)
    assert sorted(tokens) == [1, 2, 3]
    assert list(failed) == [4]
    assert "--adapter-memory-bytes" in failed[4]
    stacks = loops.model.adapters
    assert stacks.num_bytes(stacks.keys, stacks.num_slots, stacks.rank) <= one_large


def test_a_request_that_waits_for_an_adapter_slot_is_not_starved(loops: Any, many: dict[str, Path]) -> None:
    loop = loops.make(max_adapters=1)
    for name, folder in many.items():
        loop.intake.adapters.learn(name, folder)
    loop.submit(make_submit(1, "a0", max_tokens=4))
    key, ended, end = 2, set(), time.monotonic() + 60
    while not loop.scheduler.num_running:  # its adapter has the slot
        assert time.monotonic() < end
        loop.step()
    loop.submit(make_submit(key, "a1", max_tokens=4))
    while 2 not in ended:
        assert time.monotonic() < end, "it waits for ever"
        if loop.scheduler.num_running + loop.scheduler.num_waiting < 2:  # there is always another request for the first
            key += 1
            loop.submit(make_submit(key, "a0", max_tokens=4))
        loop.step()
        step = loop.take_outputs()
        ended |= {output.key for output in step.outputs if output.finish} if step else set()
    assert len(ended) > 2


def test_the_same_prompt_shares_no_cache_with_another_adapter(loops: Any, many: dict[str, Path]) -> None:
    loop = loops.make(adapters={name: str(folder) for name, folder in many.items()})
    seen = []
    for key, name in enumerate(("", "a0", "a1", "a0", ""), 1):
        finish_of = run_all(loop, [make_submit(key, name, 40)])[key].finish
        assert finish_of is not None
        seen.append(finish_of.num_cached_tokens > 0)
    assert seen == [False, False, False, True, True]


def test_a_replica_that_slept_reads_its_adapters_again(loops: Any, many: dict[str, Path]) -> None:
    loop = loops.make(adapters={"a0": str(many["a0"])})
    before = run_all(loop, [make_submit(1, "a0")])[1].token_ids
    loop.sleep()
    assert not loop.intake.adapters.slots
    loop.wake()
    assert run_all(loop, [make_submit(2, "a0")])[2].token_ids == before


def test_requests_that_wait_for_their_adapter_can_be_extended_and_aborted(loops: Any, many: dict[str, Path]) -> None:
    loop = loops.make()
    for name, folder in many.items():
        loop.intake.adapters.learn(name, folder)
    loop.submit(make_submit(1, "a0", max_tokens=6))
    loop.submit(make_submit(2, "a1", max_tokens=6))
    loop.extend(1, 6, last=True)
    loop.abort(2)
    tokens, failed = finish(loop, 2)
    assert len(tokens[1]) == 6
    assert tokens[2] == []
    assert not failed


def test_an_adapter_that_is_not_there_or_unfit_fails_its_request_and_no_other(
    loops: Any, checkpoint: Path, mixtral: Path, many: dict[str, Path], tmp_path: Path
) -> None:
    loop = loops.make()
    other = write_adapter(tmp_path / "other", mixtral, modules=("w1", "w2", "w3"))
    loop.intake.adapters.learn("a0", many["a0"])
    loop.intake.adapters.learn("other", other)
    for key, name in enumerate(("a0", "nobody's", "other"), 1):
        loop.submit(make_submit(key, name))
    tokens, failed = finish(loop, 3)
    assert len(tokens[1]) == NUM_OUTPUT
    assert failed[2].startswith("adapter_missing")
    assert failed[3].startswith("adapter_refused")
    assert "trained on this model" in failed[3]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_dora": True}, "DoRA is not supported"),
        ({"bias": "all"}, "biases are not supported"),
        ({"peft_type": "IA3"}, "use a LORA adapter"),
        ({"r": 65}, "--max-adapter-rank 64"),
        ({"r": 8}, "do not have the rank 8"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"lora_alpha": "much"}, "cannot be read"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_with_the_reason(
    loops: Any, checkpoint: Path, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    folder = write_adapter(tmp_path / "odd", checkpoint, **changes)
    with pytest.raises(AdapterError, match=complaint):
        read_adapter(folder, loops.model.spec, max_rank=64)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("q_proj", "lm_head", "tensors of unsupported modules"),
        ("self_attn.q_proj", "mlp.gate", "tensors of unsupported modules"),
        ("self_attn.q_proj", "mlp.experts.8.up_proj", r"has no module layers.0.mlp.experts.8"),
        ("q_proj.lora_A", "q_proj.lora_C", "tensors of unsupported modules"),
        ("layers.1.", f"layers.{'1' * 5000}.", "tensors of unsupported modules"),
        ("layers.1.self_attn.q_proj.lora_A", "layers.7.self_attn.q_proj.lora_A", "tensors of unsupported modules"),
        ("layers.1.self_attn.q_proj.lora_A", "layers.1.mlp.experts.0.up_proj.lora_A", "needs both lora_A and lora_B"),
    ],
)
def test_tensors_that_have_no_place_are_named(
    loops: Any, checkpoint: Path, tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    folder = write_adapter(tmp_path / "odd", checkpoint)
    tensors = load_file(folder / TENSORS)
    save_file({name.replace(before, after): tensor for name, tensor in tensors.items()}, folder / TENSORS)
    spec = loops.model.spec
    with pytest.raises(AdapterError, match=complaint):
        rank_factors(read_adapter(folder, spec, max_rank=64), spec)


def test_a_number_that_is_none_is_refused_so_that_it_reaches_nobodys_step(
    loops: Any, checkpoint: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "nan", checkpoint)
    tensors = load_file(folder / TENSORS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, folder / TENSORS)
    with pytest.raises(AdapterError, match="finite"):
        read_adapter(folder, loops.model.spec, max_rank=64)


def test_adapters_of_the_command_line_are_checked_at_the_start(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"'mine'.*has no adapter_config.json"):
        load_loop(EngineConfig(model=str(checkpoint), name="tiny", adapters={"mine": str(tmp_path)}))


def test_a_read_that_nobody_waits_for_any_more_decides_nothing(
    loops: Any, many: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail, reads = threading.Event(), list[Path]()

    def fails_at_first(folder: Path, *args: Any, **more: Any) -> Any:
        reads.append(folder)
        if len(reads) > 1:
            return read_adapter(folder, *args, **more)
        assert may_fail.wait(60.0)
        raise AdapterError("its folder is away")

    monkeypatch.setattr(adapter_slots, "read_adapter", fails_at_first)
    loop = loops.make()
    loop.intake.adapters.learn("late", many["a0"])
    loop.submit(make_submit(1, "late"))
    loop.step()  # it is being read
    loop.abort(1)
    loop.take_outputs()
    may_fail.set()
    loop.submit(make_submit(2, "late"))
    tokens, failed = finish(loop, 1)
    assert len(tokens[2]) == NUM_OUTPUT and not failed
    assert len(reads) == 2


def test_errors_of_reading_an_adapter_fail_its_request_only(
    loops: Any, many: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: Any, **_more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(adapter_slots, "read_adapter", fails)
    loop = loops.make()
    loop.intake.adapters.learn("a0", many["a0"])
    loop.submit(make_submit(1, "a0"))
    loop.submit(make_submit(2, ""))
    tokens, failed = finish(loop, 2)
    assert len(tokens[2]) == NUM_OUTPUT
    assert "cannot be read" in failed[1]


def test_products_whose_rows_belong_to_two_projections_take_no_adapters() -> None:
    """Gemma 4: keys are also the values in layers with full attention, and experts run beside a dense feed-forward."""
    config = {"model_type": "gemma4_text", **CATALOG["gemma4_text"].settings}
    local, full = (spec_from_config(config).layers[index] for index in (0, 5))
    assert form_of(local, Product.QKV, 2816) is not None
    assert form_of(full, Product.QKV, 2816) is None
    assert form_of(full, Product.OUTPUT, 2816) is not None
    assert form_of(local, Product.GATE_UP, 2816) is form_of(local, Product.DOWN, 2816) is None
