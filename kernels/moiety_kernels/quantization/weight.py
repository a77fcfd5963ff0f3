"""Format and data of a quantized weight. N outputs, K inputs, G groups of inputs that share a scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

HALF_BLOCK = 16  # inputs of a group that floats of four bits may have, too
BLOCK = 32  # inputs that the CPU kernels need packed together; every group consists of some of them
SCALE_BLOCK = 128  # rows and columns of float8 that share a scale, where the GPU kernels use block scales
GPU_PACK = 64  # inputs that the GPU kernels need packed together; its bytes' halves are two groups of 32


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Signed integers of `bits`, and a scale for every `group` of a row's inputs; None: one scale per row.

    `floating` numbers have an exponent: 8-bit ones are float8_e4m3fn, 4-bit ones are e2m1. Numbers of four bits are
    stored in packs: the lower halves of a pack's bytes hold its first inputs, the upper halves its last. Each row has
    its own scales, which may equal its neighbours': for block scales, `rows` rows have the same, counted from the first
    row of a matrix before it was joined with others. With `offsets`, which only integers of four bits have, each
    group's scale is followed by an offset: a weight is its number · scale + offset.
    `ordered`: weights store their inputs in another order than the layer's, so that those of a group lie together.
    """

    name: str
    bits: int
    group: int | None
    floating: bool = False
    pack: int = BLOCK
    rows: int = 1
    offsets: bool = False
    ordered: bool = False

    @property
    def half(self) -> int:
        """Half of the range: numbers are -half … half - 1."""
        return int(2 ** (self.bits - 1))

    @property
    def is_float8(self) -> bool:
        return self.floating and self.bits == 8

    @property
    def of_experts_only(self) -> bool:
        """True if only experts' weights use this format: mxfp4 as gpt-oss has it."""
        return self.name == MXFP4.name

    def num_groups(self, width: int) -> int:
        return 1 if self.group is None else -(-width // self.group)

    def num_scales(self, width: int) -> int:
        """Return the number of float32 that belong to a row of `width` inputs: its groups' scales, and offsets."""
        return self.num_groups(width) * (2 if self.offsets else 1)

    @property
    def is_kept(self) -> bool:
        """True if the CPU kernels support weights in this format; a GPU's require more."""
        if self.in_halves:
            return True
        return self.bits in (4, 8) and (
            self.group is None or (self.group % BLOCK == 0 and self.group & (self.group - 1) == 0)
        )

    @property
    def in_halves(self) -> bool:
        """True if each half of a block has a scale: NVFP4."""
        return self.floating and self.bits == 4 and self.group == HALF_BLOCK

    def is_stored_as(self, other: WeightFormat | None) -> bool:
        """Return whether weights in `other` are in this format too, whatever their packing, once scales are repeated.

        A scale of a group of 4-bit integers is then that of each smaller group within it.
        """
        if other is None:
            return False
        same = replace(self, pack=other.pack)
        if self.bits != 4 or self.floating or self.group is None or same == other:
            return same == other
        finer = other.group is None or other.group % self.group == 0
        return finer and replace(same, group=other.group) == other

    def takes(self, width: int) -> bool:
        """Return whether rows of that many inputs can have this format."""
        whole = self.group is None or self.is_float8 or width % self.group == 0
        return width % self.pack == 0 and whole


INT8 = WeightFormat("int8", 8, None)
INT4 = WeightFormat("int4", 4, 32)
FP8 = WeightFormat("fp8", 8, None, floating=True)
MXFP4 = WeightFormat("mxfp4", 4, 32, floating=True)
DENSE_MXFP4 = WeightFormat("mxfp4_dense", 4, 32, floating=True)
NVFP4 = WeightFormat("nvfp4", 4, HALF_BLOCK, floating=True)
FORMATS = {one.name: one for one in (INT8, INT4, FP8)}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight.

    `values`: uint8 for four bits, float8_e4m3fn or int8, in the kernels' order (see `reference.pack`). `scales`:
    float32, for a format with offsets (scale, offset) of each group. Both have the shape of a weight [..., N, K] in all
    but their last dimension. `order`: int32 [..., K], the layer's input that each stored one is, or -1 for one that
    counts as zero; None if they are in the layer's order.
    """

    values_NK: Tensor
    scales_NG: Tensor
    format: WeightFormat
    order_K: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *rows, width = self.values_NK.shape
        return (*rows, width * (2 if self.format.bits == 4 else 1))

    @property
    def device_type(self) -> str:
        return self.values_NK.device.type

    def is_contiguous(self) -> bool:
        parts = (self.values_NK, self.scales_NG, self.order_K)
        return all(part.is_contiguous() for part in parts if part is not None)

    def in_stored_order(self) -> QuantizedWeight:
        """Return the weight for inputs that are gathered in its order."""
        return self if self.order_K is None else replace(self, order_K=None)

    def unsqueeze(self, dim: int) -> QuantizedWeight:
        """Return the weight with one more dimension before the last two."""
        order = None if self.order_K is None else self.order_K.unsqueeze(dim)
        return QuantizedWeight(self.values_NK.unsqueeze(dim), self.scales_NG.unsqueeze(dim), self.format, order)

    def __getitem__(self, index: int) -> QuantizedWeight:
        """Return one of the weights stacked in the first dimension."""
        order = None if self.order_K is None else self.order_K[index]
        return QuantizedWeight(self.values_NK[index], self.scales_NG[index], self.format, order)


Weight = Tensor | QuantizedWeight
