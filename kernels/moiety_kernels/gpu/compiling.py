"""Compiling kernels for a GPU without having one, and what the compiled code needs of it.

Works where Triton is not interpreting (`TRITON_INTERPRET` unset). The tools of NVIDIA's that it asks come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from moiety_kernels.gpu.cases import CompileCase
    from moiety_kernels.gpu.targets import Target

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_HIP_STAGES = 2  # more do not fit in its shared memory


class CompilationError(Exception):
    """A kernel does not build for a target; says which and why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one program of a compiled kernel takes. `registers` a thread, the rest in bytes a thread or a program."""

    registers: int
    spill_bytes: int
    shared_bytes: int


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
        built = triton.compile(
            source,
            target=GPUTarget(target.backend, target.arch, target.warp_size),
            options={"num_warps": case.num_warps, "num_stages": stages},
        )
    except Exception as exc:  # whatever the compiler raises, of which there is no common root
        raise CompilationError(f"{case.name} does not compile for {target.name}: {exc}") from exc
    if target.backend == "hip":
        return _hip_resources(built)
    taken = _cuda_resources(built, target)
    if taken.shared_bytes < case.least_shared_bytes:
        wanted = f"{taken.shared_bytes} bytes of shared memory and not {case.least_shared_bytes}"
        raise CompilationError(f"{case.name} takes {wanted} on {target.name}: some of its loads wait where they stand")
    return taken


def _cuda_resources(built: Any, target: Target) -> Resources:
    """From ptxas's own report on the PTX."""
    arch = f"sm_{target.arch}a" if int(target.arch) >= 90 else f"sm_{target.arch}"
    ptxas = _TOOLS / ("ptxas-blackwell" if int(target.arch) >= 100 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if registers is None or spilled is None:
        raise CompilationError(f"ptxas did not say what the kernel takes: {said.strip()[:500]}")
    return Resources(int(registers[1]), int(spilled[1]) + int(spilled[2]), built.metadata.shared)


def _hip_resources(built: Any) -> Resources:
    assembly = built.asm["amdgcn"]

    def count(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise CompilationError(f"the compiled code does not state its {key}")
        return int(found[1])

    spilled = 4 * (count("vgpr_spill_count") + count("sgpr_spill_count"))
    return Resources(count("vgpr_count"), spilled, count("group_segment_fixed_size"))
