"""Arguments of launches that the Triton kernels of linear attention share, and their compile cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moiety_kernels.gpu.cases import CompileCase

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

_TYPES = {"p_slot": "*i64", "p_has_state": "*i32", "p_start": "*i32"}
_UNALIGNED = frozenset(("p_slot", "p_has_state", "p_start", "first_sequence"))


def head_constants(heads: RecurrentHeads) -> dict[str, Any]:
    """Return the constants of a launch that follow from the heads."""
    (_, key_heads, width), (_, value_heads, value_width) = heads.k_THK.shape, heads.v_TMV.shape
    return {"HEADS": key_heads, "VALUE_HEADS": value_heads, "WIDTH": width, "VALUE_WIDTH": value_width}


def sequence_tensors(sequences: RecurrentSequences) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of the sequences in the order of the kernels' arguments."""
    return sequences.slot_S, sequences.has_state_S, sequences.query_start_S1


def make_compile_case(
    kernel: Any, name: str, types: dict[str, str], constants: dict[str, Any], warps: tuple[int, int]
) -> CompileCase:
    """Return a case of a kernel with those of the constants that it takes, and `warps`: its warps and stages.

    `types` has the types of pointers, except for those of the sequences.
    """
    known = {key: value for key, value in constants.items() if key in kernel.arg_names}
    given = [key for key in kernel.arg_names if key not in known]
    return CompileCase(
        f"{kernel.__name__} {name}",
        kernel,
        {key: (types | _TYPES).get(key, "i32") for key in given},
        known,
        num_warps=warps[0],
        num_stages=warps[1],
        unaligned=_UNALIGNED,
    )
