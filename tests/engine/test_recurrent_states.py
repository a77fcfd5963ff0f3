"""Recurrent layers continue from the state of their own sequence.

Tokens are chunked, batched, found in the prefix cache and recomputed. The layer is a decaying linear attention after a
short convolution, so no real family is needed. Answers are compared with those of the same model to each prompt alone,
in one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.poisoned_engine import PoisonedEngine
from tests.preemption import preempt
from torch import Tensor

from moiety_engine.config import EngineConfig, Overlap, Speculate
from moiety_engine.errors import InvalidConfig, OutOfMemory
from moiety_engine.loop_setup import build_loop
from moiety_engine.model.arithmetic import Arithmetic
from moiety_engine.model.batch import Batch, Cache, RecurrentRows, RecurrentStateCache
from moiety_engine.model.cache_groups import cache_groups
from moiety_engine.model.dummy import draw_weights
from moiety_engine.model.families import read_spec
from moiety_engine.model.kv_allocation import KvAllocation
from moiety_engine.model.recurrent_specs import RecurrentSpec, StatePart
from moiety_engine.model.rope_spec import RopeSpec
from moiety_engine.model.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.transformer_options import TransformerOptions
from moiety_engine.model.weights import AttentionWeights
from moiety_engine.runner.memory import num_states
from moiety_wire.engine_choices import Batching

BLOCK_SIZE = 4
DECAY = 0.9


@dataclass(frozen=True, slots=True)
class DecaySpec(AttentionSpec, RecurrentSpec):
    """A layer with the weights of an attention layer."""

    output_width = AttentionSpec.q_width
    row_widths = ()
    divided_heads = ()

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        matrix = StatePart((self.num_kv_heads, self.head_dim, self.head_dim))
        return matrix, StatePart((2, self.q_width + 2 * self.kv_width), exact=False)

    @property
    def input_widths(self) -> tuple[int, ...]:
        return (self.q_width + 2 * self.kv_width,)


class DecayLayer:
    """S ← 0.9 S + k vᵀ for each token, read by its query; the projections are mixed with those of two tokens before."""

    def __init__(self, spec: AttentionSpec, weights: AttentionWeights) -> None:
        self._spec, self._weights = spec, weights

    def __call__(self, x_TD: Tensor, batch: Batch, cache: Cache) -> Tensor:
        assert isinstance(cache, RecurrentStateCache)
        assert batch.states is not None
        mixed_TC = x_TD @ self._weights.qkv_CD.T
        cache.record(batch.states, mixed_TC)
        return self._advance(mixed_TC, batch.states, cache)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        self._advance(inputs_TC[0], rows, cache)

    def _advance(self, mixed_TC: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        spec, (matrix, tail) = self._spec, cache.parts
        out_TD = mixed_TC.new_empty(len(mixed_TC), self._weights.output_DC.shape[0])
        starts = rows.run_start_R1.tolist()
        assert max(end - begin for begin, end in pairwise(starts)) == rows.max_run
        assert starts[: rows.num_single + 1] == list(range(rows.num_single + 1))
        for run, (begin, end) in enumerate(pairwise(starts)):
            slot, begins = int(rows.slots_R[run]), not rows.has_state_R[run]
            state = torch.zeros_like(matrix[0]) if begins else matrix[slot].clone()
            before = torch.zeros_like(tail[0]) if begins else tail[slot].clone()
            for token in range(begin, end):
                row = mixed_TC[token] + 0.5 * before[1] + 0.25 * before[0]
                before = torch.stack((before[1], mixed_TC[token]))
                q, k, v = row.split([spec.q_width, spec.kv_width, spec.kv_width])
                state = DECAY * state + torch.einsum("gk,gv->gkv", self._heads(k), self._heads(v))
                read = torch.einsum("ghk,gkv->ghv", q.view(spec.num_kv_heads, -1, spec.head_dim), state)
                out_TD[token] = self._weights.output_DC @ read.reshape(-1)
            matrix[slot], tail[slot] = state, before
        return out_TD

    def _heads(self, row: Tensor) -> Tensor:
        return row.view(self._spec.num_kv_heads, self._spec.head_dim)


class DecayModel(Transformer):
    """A decoder whose first and last layer are recurrent."""

    def __init__(self, folder: Path, **options: Any) -> None:
        plain = read_spec(folder)
        (layer,) = plain.layers
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        fields = {name: getattr(attention, name) for name in AttentionSpec.__dataclass_fields__}
        recurrent = replace(layer, attention=DecaySpec(**fields))
        spec = replace(plain, layers=(recurrent, layer, recurrent))
        weights = draw_weights(spec, device=torch.device("cpu"), dtype=torch.float32)
        super().__init__(spec, weights, TransformerOptions(**options))
        for index in spec.recurrent_layers:
            own = weights.layers[index].attention
            assert isinstance(own, AttentionWeights)
            self._layers.attentions[index] = self._layers.recurrent[index] = DecayLayer(DecaySpec(**fields), own)


class Engine(PoisonedEngine):
    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        super().run(until)
        if self.loop.scheduler.idle:
            states = self.loop.scheduler.kv.states
            assert states is not None
            assert states.pool.num_used == self.loop.scheduler.kv.pool.num_used == 0

    def ask(self, key: int, prompt: list[int]) -> int:
        """Answer a prompt; return how many of its tokens were cached."""
        self.submit(key, prompt)
        self.run()
        return self.finishes[key].num_cached_tokens


def make_engine(
    folder: Path,
    served: Transformer,
    block_size: int,
    num_blocks: int,
    num_snapshots: int,
    /,
    *,
    draft_models: tuple[Transformer, ...] = (),
    **settings: Any,
) -> Engine:
    """Return an engine with memory for so many blocks, and for so many snapshots beside the running states.

    The settings can have another block size.
    """
    num_slots = settings.setdefault("max_running", 4) + num_snapshots
    memory = num_blocks * served.kv_bytes_per_block(block_size) + num_slots * served.state_bytes
    sizes = {"block_size": block_size, "max_batch_tokens": 64, "kv_memory_bytes": memory}
    config = EngineConfig(model=str(folder), name="tiny", **sizes | settings)
    ticks = count(10**18, 10**7)  # a clock by which all steps take the same, so that drafts cost nothing
    return Engine(build_loop(served, config, clock_ns=lambda: next(ticks), draft_models=draft_models))


@pytest.fixture(scope="module")
def model(sketch_loops: Any) -> DecayModel:
    return DecayModel(sketch_loops.folder)


@pytest.fixture
def engine(sketch_loops: Any, model: DecayModel) -> Any:
    def make(num_blocks: int = 400, num_snapshots: int = 12, invariant: bool = False, **settings: Any) -> Engine:
        served = DecayModel(sketch_loops.folder, arithmetic=Arithmetic("auto", invariant)) if invariant else model
        drafting = (sketch_loops.model,) if settings.get("speculate") is Speculate.DRAFT else ()
        return make_engine(
            sketch_loops.folder, served, BLOCK_SIZE, num_blocks, num_snapshots, draft_models=drafting, **settings
        )

    return make


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(ours: Engine, alone: Engine, keys: Any) -> None:
    for key in keys:
        assert ours.answers[key] == alone.answers[key]
        pairs = zip(ours.logprobs[key], alone.logprobs[key], strict=True)
        assert max(abs(one.logprob - other.logprob) for one, other in pairs) <= 1e-4


@pytest.fixture
def alone(engine: Any) -> Engine:
    whole: Engine = engine(max_batch_tokens=512, prefix_caching=False)
    return whole


FEW_WORDS: dict[str, Any] = {"logit_bias": dict.fromkeys((17, 230, 41), 30.0)}
PROMPTS = {key: tokens(count, seed=key) for key, count in enumerate((130, 61, 24, 5, 90))}


def assert_batched_as_alone(ours: Engine, alone: Engine) -> None:
    """Check that all prompts together get the answers that each gets alone."""
    for key, prompt in PROMPTS.items():
        ours.submit(key, prompt)
        alone.ask(key, prompt)
    ours.run()
    assert_same(ours, alone, PROMPTS)


def submit_repetitive(ours: Engine, alone: Engine) -> Iterable[int]:
    """Submit requests whose answers repeat themselves in part, so that drafts are accepted; return their keys."""
    keys = range(6)
    for key in keys:
        prompt = tokens(20 + key, seed=key) + [17, 230, 41] * 4
        ours.submit(key, prompt, num_output=40, **FEW_WORDS)
        alone.submit(key, prompt, num_output=40, **FEW_WORDS)
    return keys


def ask_next_turn(ours: Engine) -> tuple[list[int], int]:
    """Ask a prompt as the request 0 and its next turn as 1; return that turn, and how many of its tokens were found."""
    assert ours.ask(0, PROMPTS[1]) == 0
    again = PROMPTS[1] + ours.answers[0] + tokens(9, seed=9)
    return again, ours.ask(1, again)


def assert_preempted_as_alone(ours: Engine, alone: Engine, *, swaps: bool) -> None:
    """Check that a preempted sequence gets the answer that it gets alone; with `swaps`, it is not computed again."""
    for key in (0, 1):
        ours.submit(key, PROMPTS[key], num_output=30)
        alone.submit(key, PROMPTS[key], num_output=30)
    while len(ours.answers[1]) < 5:
        ours.step()
    victim = preempt(ours.loop, 1)
    assert bool(victim.kv.host_blocks) == (victim.kv.state_slot >= 0) == swaps
    ours.run()
    alone.run()
    assert (ours.finishes[1].num_recomputed_tokens == 0) == swaps
    assert_same(ours, alone, [0, 1])


@pytest.mark.parametrize("chunk", [7, 64])
def test_mixed_batches_of_chunks_answer_as_each_prompt_alone(engine: Any, alone: Engine, chunk: int) -> None:
    assert_batched_as_alone(engine(max_batch_tokens=chunk), alone)


def test_the_next_turn_continues_from_the_snapshot_at_the_end_of_the_prompt(engine: Any, alone: Engine) -> None:
    ours = engine()
    again, num_cached = ask_next_turn(ours)
    assert num_cached == 60
    alone.ask(1, again)
    assert_same(ours, alone, [1])


def test_a_prefix_that_is_met_a_second_time_gets_a_snapshot_where_prompts_part(engine: Any, alone: Engine) -> None:
    ours = engine()
    shared = tokens(40, seed=7)
    prompts = {key: shared + tokens(30, seed=10 + key) for key in range(3)}
    cached = [ours.ask(key, prompt) for key, prompt in prompts.items()]
    assert cached == [0, 0, 40]
    for key, prompt in prompts.items():
        alone.ask(key, prompt)
    assert_same(ours, alone, prompts)


def test_snapshots_give_way_to_running_sequences_and_cost_hits_only(engine: Any, alone: Engine) -> None:
    ours = engine(num_snapshots=1)
    for key, prompt in PROMPTS.items():
        ours.submit(key, prompt)
    ours.run()
    again = {10 + key: [*prompt, 4, 5, 6] for key, prompt in PROMPTS.items()}
    for key, prompt in again.items():
        ours.ask(key, prompt)
        alone.ask(key, prompt)
    assert_same(ours, alone, again)


@pytest.mark.parametrize(("swaps", "invariant"), [(True, False), (False, False), (False, True)])
def test_a_preempted_sequence_continues_from_its_state_or_is_computed_anew(
    engine: Any, alone: Engine, swaps: bool, invariant: bool
) -> None:
    ours = engine(prefix_caching=False, host_kv_memory_bytes=1 << 20 if swaps else 0, invariant=invariant)
    assert_preempted_as_alone(ours, alone, swaps=swaps)


@pytest.mark.parametrize(
    ("overlap", "speculate"),
    [
        (Overlap.OFF, {"speculate": Speculate.NGRAM}),
        (Overlap.ON, {"speculate": Speculate.NGRAM}),
        pytest.param(Overlap.ON, {"speculate": Speculate.DRAFT, "draft_model": "it"}, marks=pytest.mark.thorough),
    ],
)
def test_rejected_drafts_leave_no_trace_in_states(
    engine: Any, alone: Engine, overlap: Overlap, speculate: dict[str, Any]
) -> None:
    ours = engine(overlap=overlap, num_blocks=150, **speculate)
    keys = submit_repetitive(ours, alone)
    ours.submit(9, [17, 230, 41] * 6, num_output=40, **FEW_WORDS)
    for _ in range(500):
        ours.step()
        if len(ours.answers[9]) > 4:
            break
    ours.loop.abort(9)  # possibly while its draft is verified
    ours.run()
    alone.run()
    load = ours.loop.load()
    assert 0 < load.accepted_tokens_total < load.drafted_tokens_total
    assert ours.loop.scheduler.kv.states._num_drafts == 0
    assert_same(ours, alone, keys)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batching": Batching.PADDED}, "use another --batching"),
        ({"disk_cache": "/nowhere", "pp": 2}, "leave out --disk-cache"),
    ],
)
def test_settings_unsupported_by_recurrent_layers_are_refused_at_the_start(
    engine: Any, settings: Any, match: str
) -> None:
    with pytest.raises(InvalidConfig, match=match):
        engine(**settings)


def test_more_running_requests_than_states_fit_are_refused_with_what_to_do() -> None:
    with pytest.raises(OutOfMemory, match="lower --max-running"):
        num_states(1000, 100, max_running=6)
    assert num_states(1000, 100, max_running=2) == 3


def test_a_long_sequence_takes_less_than_a_third_of_the_memory_where_three_of_four_layers_are_recurrent() -> None:
    rope = RopeSpec(1e6, 64)
    attention = AttentionSpec(16, 2, 256, rope, 256**-0.5)  # as in Qwen 3.5, and states of about its size
    recurrent = DecaySpec(32, 32, 128, rope, 128**-0.5)
    kinds = [LayerSpec(recurrent if i % 4 != 3 else attention, DenseSpec(512)) for i in range(40)]
    plain = [LayerSpec(attention, DenseSpec(512))] * 40

    def num_bytes(layers: list[LayerSpec]) -> int:
        spec = ModelSpec("qwen3_5_moe", 1000, 2048, NormSpec(1e-6), False, 262144, "bfloat16", tuple(layers))
        allocation = KvAllocation(layers, 0, cache_groups(spec), torch.bfloat16, torch.bfloat16, None)
        return allocation.block_bytes(16) * 32768 // 16 + allocation.state_bytes

    assert num_bytes(kinds) <= 0.3 * num_bytes(plain)
