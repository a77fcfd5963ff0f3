"""Layout of the ranks, and each rank's part of the model. Without side effects.

A model's ranks lie on a mesh of pipeline stages × data-parallel attention × tensor parallel, the last one varying
fastest. The ranks of one stage share its experts: there are `ep` parts of experts, and each expert of a part is sharded
over the ranks of that part. Each part has the same number of expert slots; some of them may hold second replicas. With
expert ranks, the experts of all stages lie on these instead; they come after all other ranks, hold nothing else, and
make up the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moiety_engine.errors import InvalidConfig
from moiety_wire.engine_choices import Batching, ExpertAll2All, Speculate

if TYPE_CHECKING:
    from collections.abc import Collection

    from moiety_engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel layout of a model. Raises InvalidConfig for numbers that are incompatible."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    redundant_experts: int = 0  # slots of a layer beyond its experts
    ffn_ranks: int = 0
    excluded: tuple[int, ...] = ()  # numbers among all ranks with experts; the others hold their experts
    dcp: int = 1  # ranks of a group that divide the positions of a sequence's cache
    pcp: int = 1  # of the `dp` groups, those with one cache, which divide the tokens of a step: 1, or all of them
    is_scaled: bool = False  # the number of expert ranks was changed, so they may have unequal shares of the experts

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.ep, self.pp, self.pcp) < 1:
            raise InvalidConfig("--tp, --dp-attention, --prefill-context-parallel, --ep and --pp must be at least 1")
        assert self.pcp in (1, self.dp), "other groups have requests of their own"
        if self.dcp < 1 or self.tp % self.dcp:
            raise InvalidConfig(
                f"--decode-context-parallel {self.dcp} does not divide the {self.tp} ranks of --tp, which share the "
                "keys and values of a sequence: choose a divisor"
            )
        if self.ffn_ranks < 0:
            raise InvalidConfig(f"--ffn-ranks must be 0 (all ranks hold experts) or more, not {self.ffn_ranks}")
        if self.ffn_ranks % self.ep:
            raise InvalidConfig(
                f"--ep {self.ep} does not divide the {self.ffn_ranks} ranks of --ffn-ranks that hold the "
                "experts: choose a divisor"
            )
        if not self.ffn_ranks and self.stage_size % self.ep:
            raise InvalidConfig(
                f"--ep {self.ep} does not divide the {self.stage_size} ranks of {self.groups_option} {self.dp} "
                f"× --tp {self.tp}, which hold the experts: choose a divisor"
            )
        if self.redundant_experts % self.ep and not (self.excluded or self.is_scaled):
            most = -(-self.redundant_experts // self.ep) * self.ep
            raise InvalidConfig(
                f"--redundant-experts {self.redundant_experts} cannot be divided by --ep {self.ep}: use {most}"
            )

    @property
    def groups_option(self) -> str:
        """The option that sets the number of groups."""
        return "--dp-attention" if self.pcp == 1 else "--prefill-context-parallel"

    @property
    def num_caches(self) -> int:
        """Number of groups with requests and a KV cache of their own."""
        return self.dp // self.pcp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.tp

    @property
    def attention_ranks(self) -> int:
        """Ranks with layers and a KV cache: all but the expert ranks."""
        return self.pp * self.stage_size

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Ranks with layers of each group of --dp-attention, in all stages. Rank 0 is in the first group."""
        firsts = range(0, self.attention_ranks, self.stage_size)
        return [
            tuple(first + group * self.tp + place for first in firsts for place in range(self.tp))
            for group in range(self.dp)
        ]

    @property
    def cache_groups(self) -> list[tuple[int, ...]]:
        """Ranks with layers of each group with requests and a KV cache of its own, in all stages."""
        groups = self.groups
        return [
            tuple(rank for group in groups[first : first + self.pcp] for rank in group)
            for first in range(0, self.dp, self.pcp)
        ]

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Return the stage of a layer in a model of `num_layers` layers."""
        return layer * self.pp // num_layers

    @property
    def num_ranks(self) -> int:
        return self.attention_ranks + self.ffn_ranks

    def slots(self, num_experts: int) -> tuple[int, ...]:
        """Return the expert that each slot of a layer initially holds, the parts' slots one after the other.

        A part's slots hold its share of all experts, in order, then the first experts of the next part. With excluded
        ranks or another number of expert ranks, `start_without` decides. Raises InvalidConfig if the experts cannot be
        divided evenly.
        """
        if self.excluded or self.is_scaled:
            return self._slots_without(num_experts)
        each, spare = divide(num_experts, self.ep, "experts", "--ep"), self.redundant_experts // self.ep
        if spare > num_experts - each:
            raise InvalidConfig(
                f"--redundant-experts {self.redundant_experts} gives a rank more slots than the model's "
                f"{num_experts} experts: use at most {(num_experts - each) * self.ep} with --ep {self.ep}"
            )
        return tuple((part * each + place) % num_experts for part in range(self.ep) for place in range(each + spare))

    def slots_each(self, num_experts: int) -> int:
        """Return the number of whole experts that a rank with experts can hold in each layer."""
        num_before = len(self.excluded) + (self.ffn_ranks or self.stage_size)
        before = -(-(num_experts + self.redundant_experts) // num_before)
        return max(before, -(-num_experts // (num_before - len(self.excluded))))

    def _slots_without(self, num_experts: int) -> tuple[int, ...]:
        if self.ep == 1:
            return tuple(range(num_experts))
        from moiety_placement.survival import start_without  # noqa: PLC0415 - numpy: not for the engine server

        num_before, each = self.ep + len(self.excluded), self.slots_each(num_experts)
        slots_R = start_without(self.excluded, num_ranks=num_before, num_experts=num_experts, slots_each=each)
        return tuple(slots_R.tolist())


@dataclass(frozen=True, slots=True)
class RankPosition:
    """One rank's position on the mesh.

    For an expert rank `expert_rank` is the position, and only the expert properties are meaningful.
    """

    layout: Layout = Layout()
    rank: int = 0
    expert_stage: int | None = None  # stage whose experts an expert rank has; None: those of all stages

    @property
    def expert_rank(self) -> int | None:
        """Index among the expert ranks; None for a rank with attention."""
        first = self.layout.attention_ranks
        return self.rank - first if self.rank >= first else None

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    @property
    def dcp_rank(self) -> int:
        """Index of its shard of the positions of a sequence."""
        return self.tp_rank % self.layout.dcp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tp % self.layout.dp

    @property
    def cache_group(self) -> int:
        """Index of its group among those with requests of their own."""
        return self.dp_rank // self.layout.pcp

    @property
    def copy_rank(self) -> int:
        """Index among the ranks that have copies of its cache."""
        return self.dp_rank % self.layout.pcp

    @property
    def pp_rank(self) -> int:
        return self.rank // self.layout.stage_size

    def layers_of(self, num_layers: int) -> range:
        """Return the layers of this rank's stage; for an expert rank see `expert_stage`.

        No stage has more layers than the first one.
        """
        pp, stage = self.layout.pp, self.pp_rank if self.expert_rank is None else self.expert_stage
        if stage is None:
            return range(num_layers)
        return range(-(-num_layers * stage // pp), -(-num_layers * (stage + 1) // pp))

    @property
    def ep_rank(self) -> int:
        """Index of its part of the experts, if it has experts."""
        return self._among_experts // self.expert_cuts

    @property
    def expert_cuts(self) -> int:
        """Number of ranks over which each expert is sharded."""
        return (self.layout.ffn_ranks or self.layout.stage_size) // self.layout.ep

    @property
    def cut_rank(self) -> int:
        """Index of its shard of each of its experts."""
        return self._among_experts % self.expert_cuts

    @property
    def _among_experts(self) -> int:
        expert_rank = self.expert_rank
        return self.rank % self.layout.stage_size if expert_rank is None else expert_rank

    def slots_of(self, num_experts: int) -> tuple[int, ...]:
        """Return the experts that its slots initially hold."""
        slots = self.layout.slots(num_experts)
        each = len(slots) // self.layout.ep
        return slots[self.ep_rank * each : (self.ep_rank + 1) * each]

    def peer(self, part: int) -> int:
        """Return the rank with the same shard of another part's experts, in its stage or among the expert ranks."""
        first = self.rank - self._among_experts
        return first + part * self.expert_cuts + self.cut_rank


SINGLE_RANK = RankPosition()


def layout_of(config: EngineConfig) -> Layout:
    """Return the layout of the configuration. Raises InvalidConfig."""
    if config.prefill_context_parallel > 1:
        _require_token_division_support(config)
    layout = Layout(
        config.tp,
        config.dp_attention * config.prefill_context_parallel,
        config.ep,
        config.pp,
        config.redundant_experts,
        config.ffn_ranks,
        dcp=config.decode_context_parallel,
        pcp=config.prefill_context_parallel,
    )
    if layout.dcp > 1:
        _require_context_parallel_support(config)
    if config.batch_invariant and (config.rebalanced_every_s or layout.redundant_experts):
        raise InvalidConfig(
            "--batch-invariant is not available with --redundant-experts and --rebalance-every-s, since the rank that "
            "computes an expert depends on the batch: leave them out"
        )
    if config.batch_invariant and layout.tp > 1 and (layout.dp > 1 or layout.ffn_ranks):
        raise InvalidConfig(
            "--batch-invariant is not available with --tp together with --dp-attention or --ffn-ranks, since the rank "
            "that adds the output of experts to a token depends on the batch: leave out --tp"
        )
    if config.batching is Batching.PADDED and layout.num_caches > 1:
        raise InvalidConfig(
            "padded batching is not available with --dp-attention, which has one cache for each group: "
            "choose another --batching, or leave out --dp-attention"
        )
    if (config.rebalanced_every_s or layout.redundant_experts) and layout.ep == 1:
        raise InvalidConfig(
            "--redundant-experts and --rebalance-every-s need whole experts on several ranks: leave them out, or use "
            "--ep with several ranks of --tp, --dp-attention or --ffn-ranks"
        )
    if config.exclude_rank_after_s is not None and layout.ffn_ranks < 2:
        _require_excludable_ranks(layout)
    if config.expert_all2all is ExpertAll2All.DEEPEP:
        _require_deep_ep_layout(config, layout)
    return layout


def _require_excludable_ranks(layout: Layout) -> None:
    """Raise InvalidConfig with the reason if no rank with attention can be excluded."""
    if layout.dp == 1:
        raise InvalidConfig(
            "--exclude-rank-after-s needs ranks whose parts of the model others can hold, but each rank is required "
            "here: leave it out, use --dp-attention or --prefill-context-parallel, or at least two --ffn-ranks"
        )
    if layout.pp > 1:
        raise InvalidConfig(
            f"--exclude-rank-after-s is not available with --pp {layout.pp}, since a group of --dp-attention has ranks "
            "in each stage, which would leave together: leave out one of them, or use at least two --ffn-ranks"
        )


def _require_context_parallel_support(config: EngineConfig) -> None:
    """Raise InvalidConfig with the reason if a feature of the configuration needs all positions on one rank."""
    dcp = config.decode_context_parallel
    if config.block_size is not None and config.block_size % dcp:
        raise InvalidConfig(
            f"--block-size {config.block_size} cannot be divided by --decode-context-parallel {dcp}, whose ranks have "
            f"a part of each block: use a multiple of {dcp}"
        )


def _require_token_division_support(config: EngineConfig) -> None:
    """Raise InvalidConfig with the reason if --prefill-context-parallel does not support a feature."""
    option = f"--prefill-context-parallel {config.prefill_context_parallel}"
    unsupported = {
        "--dp-attention, whose groups have other requests": config.dp_attention > 1,
        "--decode-context-parallel, which divides the cache that these ranks copy": config.decode_context_parallel > 1,
        "--pp, whose stages compute other steps": config.pp > 1,
        "--expert-all2all deepep, which is not tested with it": config.expert_all2all is ExpertAll2All.DEEPEP,
    }
    if config.speculate in (Speculate.DRAFT, Speculate.MTP):
        raise InvalidConfig(
            f"{option} is not available with --speculate {config.speculate}, whose passes are not divided among ranks: "
            "leave out one of them, or use --speculate ngram"
        )
    for what, is_used in unsupported.items():
        if is_used:
            raise InvalidConfig(f"{option} is not available with {what}: leave out one of them")


def _require_deep_ep_layout(config: EngineConfig, layout: Layout) -> None:
    """Raise InvalidConfig with the reason if DeepEP does not support the layout or a feature of the configuration."""
    instead, ranks = "use --expert-all2all auto", layout.stage_size
    if layout.dp == 1:
        raise InvalidConfig(
            "--expert-all2all deepep needs ranks with different tokens: use it with --dp-attention, or leave it out"
        )
    if layout.ffn_ranks:
        raise InvalidConfig(f"--expert-all2all deepep is not available with --ffn-ranks: {instead}")
    if layout.ep != ranks:
        raise InvalidConfig(f"--expert-all2all deepep needs whole experts on each rank: use --ep {ranks}, or {instead}")
    if config.adapters or config.adapter_memory_bytes:
        raise InvalidConfig(
            f"--expert-all2all deepep sends no adapter slots of tokens: leave out adapters, or {instead}"
        )
    if config.batch_invariant:
        raise InvalidConfig(
            f"--expert-all2all deepep adds results in bfloat16 and is not available with --batch-invariant: {instead}"
        )


def leaving(layout: Layout, away: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that leave if the ranks in `away` are missing.

    These are the missing ranks, and those with the other heads of the same requests. Raises InvalidConfig if the
    remaining ranks cannot serve the model.
    """
    with_attention = [rank for rank in sorted(away) if rank < layout.attention_ranks]
    if with_attention and layout.pp > 1:
        why = "is the only one with its layers" if layout.dp == 1 else "has a group with ranks in each stage"
        raise InvalidConfig(f"rank {with_attention[0]} {why} (--pp {layout.pp})")
    if with_attention and with_attention[0] < layout.tp:
        raise InvalidConfig(f"rank 0 needs rank {with_attention[0]}, which holds the other heads (--tp {layout.tp})")
    groups = {rank // layout.tp for rank in with_attention}
    further = {rank for rank in range(layout.attention_ranks) if rank // layout.tp in groups}
    left = tuple(sorted(further | set(away)))
    if layout.ffn_ranks and left[-layout.ffn_ranks :] == tuple(range(layout.attention_ranks, layout.num_ranks)):
        raise InvalidConfig("no rank with experts is left")
    return left


def without(layout: Layout, ranks: Collection[int]) -> Layout:
    """Return the layout of the remaining ranks, renumbered in order; `ranks` as returned by `leaving`.

    If one of the leaving ranks had experts, the remaining ranks hold all experts, each of them whole.
    """
    with_attention = [rank for rank in sorted(ranks) if rank < layout.attention_ranks]
    with_experts = [rank - layout.attention_ranks for rank in sorted(ranks) if rank >= layout.attention_ranks]
    dp, ffn_ranks = layout.dp - len(with_attention) // layout.tp, layout.ffn_ranks - len(with_experts)
    excluded = tuple(with_experts if layout.ffn_ranks else with_attention)
    ep = (ffn_ranks or dp * layout.tp) if excluded else layout.ep
    pcp = dp if layout.pcp > 1 else 1
    return replace(layout, dp=dp, pcp=pcp, ep=ep, ffn_ranks=ffn_ranks, excluded=excluded)


def with_expert_ranks(layout: Layout, num_ranks: int, *, steps_in_flight: int = 1) -> Layout:
    """Return the layout with this number of expert ranks, each with whole experts.

    Without expert ranks, the ranks with attention have the experts of their stage, each of them whole. Raises
    InvalidConfig if the layout cannot change to this number, with so many `steps_in_flight` in the stages of --pp.
    """
    if layout.stage_size * layout.pp == 1 and not layout.ffn_ranks:
        raise InvalidConfig(
            "a single rank does not exchange anything with ranks that are added: start the engine with --ffn-ranks, "
            "whose number can be changed"
        )
    if num_ranks < 0 or (num_ranks == 0 and layout.attention_ranks == 1):
        raise InvalidConfig(f"at least one expert rank must be left, but {num_ranks} were requested")
    if steps_in_flight > 1:
        raise InvalidConfig(
            f"expert ranks compute one step after the other, but this engine has {steps_in_flight} steps in the stages "
            f"of --pp {layout.pp} at once: start it with --pp-microbatches 1, or with --ffn-ranks"
        )
    if layout.ffn_ranks and layout.ep != layout.ffn_ranks:
        raise InvalidConfig(
            f"--ep {layout.ep} divides each expert among several of the {layout.ffn_ranks} expert ranks, whose number "
            f"is therefore fixed: start the engine with --ep {layout.ffn_ranks}"
        )
    ep = num_ranks or layout.stage_size
    return replace(layout, ffn_ranks=num_ranks, ep=ep, excluded=(), is_scaled=True)


def expert_part(position: RankPosition) -> RankPosition:
    """Return the position of an expert rank that has the same experts as this rank with attention, and nothing else.

    The layout has no expert ranks, and each expert is whole.
    """
    layout = position.layout
    assert not layout.ffn_ranks and layout.ep == layout.stage_size, "other ranks have these experts"
    rank = layout.attention_ranks + position.rank % layout.stage_size
    return RankPosition(replace(layout, ffn_ranks=layout.stage_size), rank, position.pp_rank)


def divide(number: int, parts: int, what: str, option: str) -> int:
    """Return the quotient, the share of each part. Raises InvalidConfig if it is not an integer."""
    if number % parts:
        raise InvalidConfig(f"the model's {number} {what} cannot be divided by {option} {parts}: choose a divisor")
    return number // parts
