"""Compilation of kernels for a GPU that is not present, and the resources of the compiled code.

It needs Triton outside interpreter mode (`TRITON_INTERPRET` unset). NVIDIA's assembler comes with Triton.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from moiety_kernels.gpu.cases import CompileCase
    from moiety_kernels.gpu.targets import Target

_HIP_STAGES = 2  # more do not fit in its shared memory


class CompilationError(Exception):
    """A kernel does not build for a target; the message names the kernel, the target and the cause."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one program of a compiled kernel.

    `registers` per thread, the rest in bytes per thread or per program. `loads_wait`: this compiler pipelines fewer of
    its loads than the kernel is written for; that is slower, and as correct.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    loads_wait: bool = False


def compile_case(case: CompileCase, target: Target) -> Resources:
    """Build `case` for `target`; raises CompilationError."""
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    aligned = [
        (index,)
        for index, name in enumerate(names)
        if name not in case.unaligned and (signature[name].startswith("*") or signature[name] in ("i32", "i64"))
    ]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs=case.constants,
        attrs={place: [["tt.divisibility", 16]] for place in aligned},
    )
    stages = min(case.num_stages, _HIP_STAGES) if target.backend == "hip" else case.num_stages
    try:
        with knobs.runtime.scope():
            knobs.runtime.add_stages_inspection_hook = _with_ptxas_figures
            built = triton.compile(
                source,
                target=GPUTarget(target.backend, target.arch, target.warp_size),
                options={"num_warps": case.num_warps, "num_stages": stages},
            )
    except Exception as exc:  # whatever the compiler raises, which has no common base class
        raise CompilationError(f"{case.name} does not compile for {target.name}: {exc}") from exc
    if target.backend == "hip":
        return _hip_resources(built)
    taken = built.metadata
    waits = taken.shared < case.least_shared_bytes
    return Resources(taken.registers, taken.spill_bytes, taken.shared, waits)


_KEY = "with what ptxas says"  # part of the compiler's cache key, since the cache keeps the figures with the code


def _with_ptxas_figures(
    _backend: Any = None, stages: Any = None, *_of_the_compiler: Any, **_more_of_it: Any
) -> tuple[str, str] | None:
    """Check a stage of the compiler; called without arguments, return this hook's part of the cache key."""
    if stages is not None and "cubin" in stages:
        make = stages["cubin"]
        stages["cubin"] = lambda ptx, metadata: _assembled(make, ptx, metadata)
    return (_KEY, _KEY) if stages is None else None


def _assembled(make: Callable[[Any, dict[str, Any]], bytes], ptx: Any, metadata: dict[str, Any]) -> bytes:
    """Return the machine code; `metadata` receives the resources that ptxas reports."""
    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        made = make(ptx, metadata)
    registers = re.search(r"Used (\d+) registers", said.getvalue())
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.getvalue())
    if registers is None or spilled is None:
        raise CompilationError(f"ptxas did not report the resources of the kernel: {said.getvalue().strip()[:500]}")
    metadata |= {"registers": int(registers[1]), "spill_bytes": int(spilled[1]) + int(spilled[2])}
    return made


def _hip_resources(built: Any) -> Resources:
    assembly = built.asm["amdgcn"]

    def count(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise CompilationError(f"the compiled code does not state its {key}")
        return int(found[1])

    spilled = 4 * (count("vgpr_spill_count") + count("sgpr_spill_count"))
    return Resources(count("vgpr_count"), spilled, count("group_segment_fixed_size"))
