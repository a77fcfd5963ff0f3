"""Specifications of recurrent layers; `RecurrentSpec` is their base. Independent of tensors and model families.

The layers are in `recurrent_layers`, their names on disk in `names/recurrent`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of the state that a recurrent layer keeps of a sequence.

    `shape` is that of one sequence, on one rank. `exact`: float32; otherwise the part has the type of activations.
    Dimension `divided_dim` consists of `sections`, given by their widths: tensor parallelism divides each of them
    evenly, and a rank's part has its share of each, in their order. (): every rank has the whole part. `copied`:
    indices of sections that every rank has whole.
    """

    shape: tuple[int, ...]
    exact: bool = True
    sections: tuple[int, ...] = ()
    divided_dim: int = 0
    copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrentSpec(ABC):
    """Base of the specs of recurrent layers, which keep a state of fixed size instead of keys and values.

    Gated DeltaNet, Mamba-2 and short convolutions are of this kind. A subclass is a frozen dataclass.
    """

    @property
    @abstractmethod
    def state_parts(self) -> tuple[StatePart, ...]:
        """Parts of the state, for instance a matrix per head, and the last inputs of a convolution."""

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Widths of the inputs of the recurrence, by which a layer replays tokens; (): it cannot.

        They have the type of activations. Without them drafts cannot be undone, so speculation is not available.
        """
        return ()

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Width of the output of all heads."""

    @property
    @abstractmethod
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with, beside the model's width."""

    @property
    @abstractmethod
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Names of the fields that tensor parallelism divides, each with what it counts, for error messages."""

    def _matrices_and_tail(
        self, shape: tuple[int, ...], conv_taps: int, conv_sections: tuple[int, ...], copied: tuple[int, ...] = ()
    ) -> tuple[StatePart, ...]:
        """Return the parts of a state of matrices, one per head, and of the last inputs of a convolution."""
        return StatePart(shape, sections=shape[:1]), _tail(conv_taps, conv_sections, copied)

    @property
    def matrix_values(self) -> int:
        """Values of the state's exact parts, which every token reads and changes."""
        return sum(math.prod(part.shape) for part in self.state_parts if part.exact)


def _tail(conv_taps: int, sections: tuple[int, ...], copied: tuple[int, ...] = ()) -> StatePart:
    """Return the last inputs of a convolution, whose channels are these sections one after the other."""
    shape = conv_taps - 1, sum(sections)
    return StatePart(shape, exact=False, sections=sections, divided_dim=1, copied=copied)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(RecurrentSpec):
    """Gated DeltaNet (Yang et al. 2024): linear attention by the gated delta rule after a short convolution.

    Queries, keys and values are convolved; the heads' outputs are normalized with a gate. Value heads share key heads
    in groups. `conv_taps`: tokens that the convolution sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    conv_taps: int
    norm_eps: float

    @property
    def conv_channels(self) -> int:
        """Width of all queries, keys and values."""
        return sum(self.conv_sections)

    @property
    def conv_sections(self) -> tuple[int, int, int]:
        """Widths of the queries, the keys and the values of all heads."""
        keys = self.num_key_heads * self.key_width
        return keys, keys, self.output_width

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_value_heads * self.value_width

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.key_width, self.value_width, self.conv_channels

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return ("num_key_heads", "key heads of linear attention"), ("num_value_heads", "value heads")

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix of keys by values per head, and the last inputs of the convolution."""
        shape = self.num_value_heads, self.key_width, self.value_width
        return self._matrices_and_tail(shape, self.conv_taps, self.conv_sections)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The inputs of the convolution, and the strength and decay of each head's update."""
        return self.conv_channels, 2 * self.num_value_heads


@dataclass(frozen=True, slots=True)
class Mamba2Spec(RecurrentSpec):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a state space model with one decay per head.

    The heads of a group share the vectors by which their states are written (B) and read (C). The heads' inputs, B and
    C are convolved; the outputs of a group are normalized together, after a gate. `state_width`: length of B and C.
    `conv_taps`: tokens that the convolution sees. `bias`: biases of both projections. `norm`: whether outputs are
    normalized after their gate, before it, or not at all. `section_factors`: factors of the sections of the input
    projection, biases included. `output_factor`: factor of the layer's output. `is_one_group`: the layer has one group;
    of several ranks each has a part of its heads, and the whole of its B and C.
    """

    num_heads: int
    num_groups: int
    head_width: int
    state_width: int
    conv_taps: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    section_factors: tuple[float, ...] = (1.0,) * 5
    output_factor: float = 1.0
    is_one_group: bool = False

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
        """Fields that tensor parallelism divides: the heads, and their groups if there are several."""
        groups = () if self.is_one_group else (("num_groups", "groups of Mamba-2 heads"),)
        return *groups, ("num_heads", "Mamba-2 heads")

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix per head, and the last inputs of the convolution."""
        shape = self.num_heads, self.state_width, self.head_width
        copied = (1, 2) if self.is_one_group else ()
        return self._matrices_and_tail(shape, self.conv_taps, self.sections[1:4], copied)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The inputs of the convolution, and the time step of each head."""
        return self.conv_channels, self.num_heads


@dataclass(frozen=True, slots=True)
class SquareStateSpec(RecurrentSpec):
    """Base of layers whose heads have keys and values of one width, so that their states are square matrices."""

    num_heads: int
    head_width: int

    @property
    def output_width(self) -> int:
        """Width of the output of all heads."""
        return self.num_heads * self.head_width

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.head_width, self.output_width

    @property
    def _matrix_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_width, self.head_width


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec(SquareStateSpec):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): the gated delta rule with one decay per key channel.

    Queries, keys and values are convolved. `conv_taps`: tokens that the convolution sees. `low_rank`: the decays and
    the gates of the outputs are projected through `head_width` values. `lowest_decay`: bound of the logarithm of the
    decay, which is then this times the sigmoid of its projection (Ling 3).
    """

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
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return (("num_heads", "heads of linear attention"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix of keys by values per head, and the last inputs of the convolution."""
        return self._matrices_and_tail(self._matrix_shape, self.conv_taps, (self.output_width,) * 3)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The inputs of the convolution, the decay of each key channel, and the strength of each head's update."""
        return self.conv_channels, self.output_width, self.num_heads


@dataclass(frozen=True, slots=True)
class LightningSpec(SquareStateSpec):
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658): linear attention with a constant decay per head.

    Queries, keys and values pass through SiLU. The outputs of the heads of all ranks are normalized together and
    multiplied by a gate. `decays`: negative logarithm of the decay per token of each head of all ranks.
    """

    decays: tuple[float, ...]
    norm_eps: float

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return (("num_heads", "heads of lightning attention"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """A matrix of keys by values per head."""
        return (StatePart(self._matrix_shape, sections=(self.num_heads,)),)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """Queries, keys and values of all heads."""
        return (3 * self.output_width,)


@dataclass(frozen=True, slots=True)
class ShortConvSpec(RecurrentSpec):
    """Gated short convolution (LFM2): a convolution whose input and output are multiplied by projections of the token.

    `conv_taps`: tokens that the convolution sees. `bias`: the projections and the convolution have biases.
    """

    num_channels: int
    conv_taps: int
    bias: bool = False

    @property
    def output_width(self) -> int:
        """Width of the convolution's output."""
        return self.num_channels

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return (self.num_channels,)

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return (("num_channels", "channels of short convolutions"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The last inputs of the convolution."""
        return (_tail(self.conv_taps, (self.num_channels,)),)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The inputs of the convolution."""
        return (self.num_channels,)


@dataclass(frozen=True, slots=True)
class MambaSpec(RecurrentSpec):
    """Mamba (2312.00752) as Jamba has it: the time steps and what is written and read are normalized.

    They are projected from all channels, so ranks that share the channels add their parts of the projection.
    `state_width`: rows of a channel's state. `time_rank`: width of the row that time steps are projected from.
    `conv_taps`: tokens that the convolution sees. `bias`: the projections into the layer and out of it have biases.
    """

    num_channels: int
    state_width: int
    time_rank: int
    conv_taps: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False

    @property
    def output_width(self) -> int:
        """Width of all channels."""
        return self.num_channels

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.num_channels, self.state_width, self.time_rank

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides."""
        return (("num_channels", "channels of Mamba layers"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The rows of all channels' states, and the last inputs of the convolution."""
        channels = (self.num_channels,)
        states = StatePart((self.state_width, self.num_channels), sections=channels, divided_dim=1)
        return states, _tail(self.conv_taps, channels)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The inputs of the convolution, the time step of each channel, and what is written and read."""
        return self.num_channels, self.num_channels, self.state_width, self.state_width
