"""Two ranks of one model compute what transformers computes: heads, feed-forwards and experts are sharded, and outputs
are summed. Both ranks run in this process and take turns: one computes while the other waits for a collective
operation."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moiety_engine.distribution.collectives import RankCollectives, Ranks
from moiety_engine.distribution.layout import Layout, RankPosition
from moiety_engine.errors import InvalidConfig
from moiety_engine.model.checkpoint import load
from moiety_engine.model.families import read_spec
from moiety_engine.model.tensor_shards import own_spec
from moiety_engine.model.transformer import Transformer
from moiety_engine.model.transformer_options import TransformerOptions

from .conftest import Driver, Sequence
from .recent_variants import RECENT_VARIANTS

REFUSED = {
    "falcon_h1, no norms": "3 Mamba-2 heads cannot be divided by --tp 2",
}
UNDIVIDED_EXPERTS = {
    "falcon_h1",  # as the next ones, without experts
    "granitemoehybrid, dense",
    "nemotron_h, dense",
    "gemma4_text, embeddings by layer",
    "flex_olmo",  # with seven
}
DIVIDED = [name for name in RECENT_VARIANTS if name not in REFUSED]
PROMPT = [3 + (i * i * 31 + i * 7) % 370 for i in range(90)]


class Turns:
    """Meeting point of two ranks, of which one computes at a time."""

    def __init__(self) -> None:
        self.computing = threading.Lock()
        self._all_here = threading.Barrier(2, timeout=60)
        self.parts: list[Tensor] = [torch.empty(0), torch.empty(0)]

    def meet(self) -> None:
        self.computing.release()
        try:
            self._all_here.wait()
        finally:
            self.computing.acquire()

    def give_up(self) -> None:
        self._all_here.abort()


class RankInTurns(RankCollectives):
    """One of two ranks."""

    def __init__(self, turns: Turns, rank: int) -> None:
        super().__init__()
        self._turns, self.rank, self.size = turns, rank, 2

    def sum(self, x: Tensor) -> Tensor:
        first, second = self._gather(x)
        return first + second

    def gather_columns(self, x_LC: Tensor) -> Tensor:
        parts = self._gather(x_LC)
        return x_LC if self.rank else torch.cat(parts, dim=1)

    def _gather(self, x: Tensor) -> list[Tensor]:
        self._turns.parts[self.rank] = x.clone()
        self._turns.meet()
        parts = list(self._turns.parts)
        self._turns.meet()
        return parts


def logprobs_of_two_ranks(folder: Path, layout: Layout) -> Tensor:
    turns = Turns()

    def run(rank: int) -> Tensor:
        with turns.computing:
            try:
                spec, rank_position, group = read_spec(folder), RankPosition(layout, rank), RankInTurns(turns, rank)
                weights = load(
                    folder, spec, device=torch.device("cpu"), dtype=torch.float32, rank_position=rank_position
                )
                ranks = Ranks(rank_position=rank_position, tensor=group, everyone=group)
                model = Transformer(spec, weights, TransformerOptions(ranks=ranks))
                return Driver(model).prefill(Sequence(PROMPT), 64).log_softmax(-1)
            except BaseException:
                turns.give_up()
                raise

    with ThreadPoolExecutor(2) as pool:
        ours, _ = pool.map(run, range(2))
    return ours


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, ep=2), pytest.param(Layout(tp=2), marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("variant", [*DIVIDED, "olmoe, clipped, linear rope"])
def test_two_ranks_say_what_transformers_says(make_checkpoint: Any, variant: str, layout: Layout) -> None:
    checkpoint = make_checkpoint(variant)
    if variant in UNDIVIDED_EXPERTS:
        layout = Layout(tp=2)
    ours = logprobs_of_two_ranks(checkpoint.folder, layout)
    assert (ours - checkpoint.logprobs(PROMPT)).abs().max() <= 1e-4


def test_heads_that_are_normalised_together_may_outnumber_the_key_heads(make_checkpoint: Any) -> None:
    """Two ranks have the same key head, whose squares count once."""
    family, settings = RECENT_VARIANTS["minimax_m2"]
    one = {"one key head": (family, settings | {"num_key_value_heads": 1})}
    checkpoint = make_checkpoint("one key head", variants=one)
    ours = logprobs_of_two_ranks(checkpoint.folder, Layout(tp=2))
    assert (ours - checkpoint.logprobs(PROMPT)).abs().max() <= 1e-4


@pytest.mark.parametrize("of_norm", [{"mamba_rms_norm": False}, {"mamba_norm_before_gate": True}, {}], ids=str)
def test_heads_of_one_mamba_group_are_divided(make_checkpoint: Any, of_norm: dict[str, Any]) -> None:
    """Both ranks have the vectors of the group, and its norm covers the heads of both."""
    family, settings = RECENT_VARIANTS["falcon_h1"]
    one = {"one group": (family, settings | {"mamba_n_groups": 1} | of_norm)}
    checkpoint = make_checkpoint("one group", variants=one)
    ours = logprobs_of_two_ranks(checkpoint.folder, Layout(tp=2))
    assert (ours - checkpoint.logprobs(PROMPT)).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", REFUSED)
def test_heads_that_cannot_be_divided_are_refused(make_checkpoint: Any, variant: str) -> None:
    with pytest.raises(InvalidConfig, match=REFUSED[variant]):
        logprobs_of_two_ranks(make_checkpoint(variant).folder, Layout(tp=2))


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        (Layout(ffn_ranks=1), "--ffn-ranks is not available for longcat_flash, which adds the output of experts one"),
        (Layout(pp=4), "--pp 4 begins a stage with layer 1, which adds the output of experts of the stage before it"),
    ],
    ids=str,
)
def test_layouts_that_part_experts_from_their_place_are_refused(
    make_checkpoint: Any, layout: Layout, match: str
) -> None:
    spec = read_spec(make_checkpoint("longcat_flash").folder)
    with pytest.raises(InvalidConfig, match=match):
        own_spec(spec, RankPosition(layout))


def test_remote_experts_in_a_width_of_their_own_are_refused(make_checkpoint: Any) -> None:
    spec = read_spec(make_checkpoint("nemotron_h, latent experts").folder)
    with pytest.raises(InvalidConfig, match="--ffn-ranks is not available for this nemotron_h model"):
        own_spec(spec, RankPosition(Layout(ffn_ranks=1)))


def test_stages_of_a_model_with_embeddings_by_layer_are_refused(make_checkpoint: Any) -> None:
    spec = read_spec(make_checkpoint("gemma4_text, embeddings by layer").folder)
    with pytest.raises(InvalidConfig, match="--pp is not available for this gemma4_text model, whose layers add"):
        own_spec(spec, RankPosition(Layout(pp=2)))


def test_a_stage_that_begins_with_attention_beside_mamba_is_refused(make_checkpoint: Any) -> None:
    spec = read_spec(make_checkpoint("falcon_h1").folder)
    own_spec(spec, RankPosition(Layout(pp=2)))
    with pytest.raises(InvalidConfig, match="--pp 4 begins a stage with layer 1, which reads the input of a layer of"):
        own_spec(spec, RankPosition(Layout(pp=4)))
