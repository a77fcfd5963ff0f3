"""Specifications of recurrent layers; `spec.RecurrentSpec` is their base. Independent of tensors and model families.

The layers are in `recurrent_layers`, their names on disk in `names/recurrent`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.model.spec import RecurrentSpec, StatePart


@dataclass(frozen=True, slots=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a state space model with one decay per head.

    The heads of a group share the vectors by which their states are written (B) and read (C). The heads' inputs, B and
    C are convolved; the outputs of a group are normalized together, after a gate. `state_width`: length of B and C.
    `conv_taps`: tokens that the convolution sees. `bias`: biases of both projections.
    """

    num_heads: int
    num_groups: int
    head_width: int
    state_width: int
    conv_taps: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False

    @property
    def sections(self) -> tuple[int, ...]:
        """Widths of the parts of the input projection: gate, inputs of the heads, B, C, and the heads' time steps."""
        shared = self.num_groups * self.state_width
        return self.output_width, self.output_width, shared, shared, self.num_heads

    @property
    def conv_channels(self) -> int:
        """Width of the inputs of all heads, and of B and C of all groups."""
        return sum(self.sections[1:4])

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * self.head_width

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.state_width, self.head_width, self.output_width, self.conv_channels

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides: the groups, whose outputs are normalized together, and the heads."""
        return ("num_groups", "groups of Mamba-2 heads"), ("num_heads", "Mamba-2 heads")

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix per head, and the last inputs of the convolution."""
        matrices = StatePart((self.num_heads, self.state_width, self.head_width))
        return matrices, StatePart((self.conv_taps - 1, self.conv_channels), exact=False)


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec(RecurrentSpec):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): the gated delta rule with one decay per key channel.

    Queries, keys and values are convolved. `conv_taps`: tokens that the convolution sees. `low_rank`: the decays and
    the gates of the outputs are projected through `head_width` values. `lowest_decay`: bound of the logarithm of the
    decay, which is then this times the sigmoid of its projection (Ling 3).
    """

    num_heads: int
    head_width: int
    conv_taps: int
    norm_eps: float
    low_rank: bool = True
    lowest_decay: float | None = None

    @property
    def input_sections(self) -> tuple[int, int, int]:
        """Rows of the small projection: inputs of the decays and of the gates, and the strengths of the updates."""
        rank = self.head_width if self.low_rank else 0
        return rank, rank, self.num_heads

    @property
    def conv_channels(self) -> int:
        """Width of all queries, keys and values."""
        return 3 * self.output_width

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * self.head_width

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.head_width, self.output_width

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return (("num_heads", "heads of linear attention"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix of keys by values per head, and the last inputs of the convolution."""
        matrices = StatePart((self.num_heads, self.head_width, self.head_width))
        return matrices, StatePart((self.conv_taps - 1, self.conv_channels), exact=False)


@dataclass(frozen=True, slots=True)
class LightningSpec(RecurrentSpec):
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658): linear attention with a constant decay per head.

    Queries, keys and values pass through SiLU. The outputs of all heads are normalized together and multiplied by
    a gate, so the heads cannot be divided among ranks. `decays`: negative logarithm of each head's decay per token.
    """

    num_heads: int
    head_width: int
    decays: tuple[float, ...]
    norm_eps: float
    num_groups: int = 1

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * self.head_width

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.head_width, self.output_width

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides: none, as the single group of normalized heads has no divisor."""
        return (("num_groups", "groups of heads that are normalized together"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix of keys by values per head."""
        return (StatePart((self.num_heads, self.head_width, self.head_width)),)
