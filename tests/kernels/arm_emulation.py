"""Compilation of the CPU kernels for Arm, and their execution by qemu.

The kernels' LLVM code of the level `neon` names no instruction of x86, so that LLVM compiles it for aarch64 on any
machine. `ArmMachine` links the machine code at fixed addresses in this process. Another process, which qemu emulates,
calls a function there and fetches each page of memory that it touches from this process (`arm_emulation.c`). So the
tests of kernels run as they are. The machine needs qemu's user mode, and the linker and C compiler of PyPI's `ziglang`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import llvmlite.binding as llvm
import pytest
from llvmlite import ir
from numba import cfunc, types
from numba.core.dispatcher import Dispatcher

import moiety_kernels
from moiety_kernels.cpu import compiling, products
from moiety_kernels.cpu.arm_instructions import ARM_INSTRUCTIONS, ArmInstruction
from moiety_kernels.cpu.compiling import driver_address
from moiety_kernels.cpu.dots import PLAIN_PAIRS_AVAILABLE
from moiety_kernels.cpu.emitter import Emitter
from moiety_kernels.cpu.instructions import ARM_EXTENSIONS, EMULATED
from moiety_kernels.cpu.structs import Struct, StructAt, layout_of
from moiety_kernels.cpu.team import Job, Program, Team
from moiety_kernels.cpu.values import Vector

TRIPLE = "aarch64-unknown-linux-gnu"
FEATURES = "+neon,+bf16,+dotprod,+i8mm" if ARM_EXTENSIONS <= EMULATED else "+neon"
FOLDER_VARIABLE = "MOIETY_ARM_FOLDER"  # for files of the emulation
C_FUNCTIONS = {"exp", "expm1", "log", "log1p", "tanh", "pow", "sin", "cos", "sqrt"}  # that `arm_emulation.c` has
C_FUNCTIONS |= {f"{name}f" for name in C_FUNCTIONS} | {"memcpy", "memmove", "memset", "sched_yield"}
OF_PYTHON = ("Py", "numba_", "NRT_")  # functions that report errors, which no kernel has
QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
HAS_ZIG = importlib.util.find_spec("ziglang") is not None
_CODE_AT, _CODE_BYTES = 0x10_0000_0000, 1 << 28
_SEGMENT, _LOADED = struct.Struct("<IIQQQQQ"), 1  # ELF's program header, and its type of a segment in memory
_RUNNER = Path(__file__).with_name("arm_emulation.c")
_FAILURES = {3: "read memory that this process does not have", 4: "found no room for a page", 5: "could not write"}


class Compiled(NamedTuple):
    """A kernel for Arm: the name of its function, and its object file."""

    symbol: str
    object_file: bytes
    instructions: frozenset[str]
    externals: frozenset[str]  # names of functions and data that it takes from elsewhere


@functools.cache
def _target() -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(TRIPLE)
    return target.create_target_machine(cpu="generic", features=FEATURES, opt=3, reloc="static", codemodel="small")


def compile_for_arm(function: Callable[..., None], *arguments: types.Type) -> Compiled:
    """Compile a function of these arguments, as `compiling` does for this machine."""
    kernel: Any = cfunc(types.void(*arguments), error_model="numpy")(function)
    code = kernel._library.get_llvm_str()
    code = re.sub("target triple = .*", f'target triple = "{TRIPLE}"', code)
    code = re.sub("target datalayout = .*", f'target datalayout = "{_target().target_data}"', code)
    for instruction in ARM_INSTRUCTIONS:
        code = _with_instruction(code, instruction)
    module = llvm.parse_assembly(code)
    names = [one.name for one in (*module.functions, *module.global_variables) if one.is_declaration]
    externals = frozenset(name for name in names if not name.startswith("llvm.") or name.startswith("llvm.x86."))
    instructions = re.findall(r"^\t([a-z]\w*)\t", _target().emit_assembly(module), flags=re.MULTILINE)
    return Compiled(kernel.native_name, _target().emit_object(module), frozenset(instructions), externals)


def _with_instruction(code: str, instruction: ArmInstruction) -> str:
    """Return the code with the instruction's intrinsic in the functions that emulate it."""
    native = Emitter(ir.Module(), "native", instruction.arguments, instruction.result)
    native.builder.ret(instruction.native(native, *[Vector(native, one) for one in native.function.args]).ir)
    body = str(native.function).partition("{")[2]
    intrinsics = [str(one) for one in native.module.functions if one.is_declaration]

    def function(found: re.Match[str]) -> str:
        names = re.findall(r"%[\w.]+(?=[,)])", found["head"])
        own = body
        for argument, name in zip(native.function.args, names, strict=True):
            own = own.replace(argument.get_reference(), name)
        return f"{found['head']}{own}"

    pattern = rf"(?P<head>define [^\n]*@moiety_arm_{instruction.name}[\w.]*\([^\n]*\{{)\n.*?\n\}}\n"
    code, count = re.subn(pattern, function, code, flags=re.DOTALL)
    return "\n".join([code, *(intrinsics if count else [])])


def all_kernels() -> Iterator[tuple[Callable[..., None], tuple[types.Type, ...]]]:
    """Find all tasks and drivers of the package by their arguments, and the products without matrix tiles."""
    for _, name, _ in pkgutil.walk_packages(moiety_kernels.__path__, "moiety_kernels."):
        if not re.search(r"\.cpu(_\w+)?(\.|$)", name):
            continue
        for found in vars(importlib.import_module(name)).values():
            plain = found.py_func if isinstance(found, Dispatcher) else found
            if not inspect.isfunction(plain) or plain.__module__ != name:
                continue
            match [*inspect.signature(plain).parameters]:
                case ["args", "task", "scratch"]:
                    yield plain, (StructAt(get_type_hints(plain)["args"]), types.int64, types.int64)
                case ["state", "scratch", "function", "args", "num_tasks"]:
                    yield plain, (types.int64,) * 5
    products_of_kinds = [products._with_float32, products._with_bfloat16, products._in_eights]
    products_of_kinds += [products._in_grouped_eights, *products._WORD_FOURS.values()]
    products_of_kinds += [products._in_pairs] if PLAIN_PAIRS_AVAILABLE else []
    for product in products_of_kinds:
        yield product, (types.int64,) * products._NUM_ARGS


class ArmMachine:
    """Machine code for Arm in this process's memory, and its execution by qemu."""

    def __init__(self, folder: Path) -> None:
        """Create the machine; `folder` takes files that it needs."""
        self._folder = folder
        self._runner = folder / "runner"
        if not self._runner.exists():
            self._zig("cc", "-target", "aarch64-linux-musl", "-O2", "-static", "-o", self._runner, _RUNNER)
        self._functions = self._run().split()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        at = libc.mmap(_CODE_AT, _CODE_BYTES, 3, 0x10_4022, -1, 0)  # private, without a file, only there, no reserve
        assert at == _CODE_AT, f"no memory at {_CODE_AT:#x}"
        self._end = at
        self._memory = os.open("/proc/self/mem", os.O_RDWR)
        os.set_inheritable(self._memory, True)

    def _run(self, *words: str) -> str:
        assert QEMU is not None
        command = [QEMU, str(self._runner), *words]
        done = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=False)
        problem = _FAILURES.get(done.returncode, f"ended with {done.returncode}, {done.stderr}")
        assert done.returncode == 0, f"the emulated process {problem}"
        return done.stdout

    def _zig(self, *command: str | Path) -> None:
        subprocess.run([sys.executable, "-m", "ziglang", *command], check=True, cwd=self._folder)

    def load(self, compiled: Compiled) -> int:
        """Link a kernel, put its code into memory, and return its address."""
        path, image = self._folder / "kernel.o", self._folder / "kernel"
        path.write_bytes(compiled.object_file)
        options = ["-static", f"--image-base={self._end}", "-e", compiled.symbol]
        options += [f"--defsym={place}" for place in self._functions]
        options += [f"--defsym={name}=0" for name in compiled.externals if name.startswith(OF_PYTHON)]
        self._zig("ld.lld", *options, "-o", image, path)
        content = image.read_bytes()
        entry, headers = struct.unpack_from("<QQ", content, 24)  # of ELF's header
        size, count = struct.unpack_from("<HH", content, 54)
        for number in range(count):
            kind, _, offset, at, _, in_file, in_memory = _SEGMENT.unpack_from(content, headers + size * number)
            if kind == _LOADED:
                ctypes.memmove(at, content[offset : offset + in_file], in_file)
                self._end = max(self._end, (at + in_memory + 0xFFFF) & ~0xFFFF)
        assert self._end <= _CODE_AT + _CODE_BYTES, "too many kernels"
        return int(entry)

    def call(self, function: int, *numbers: int) -> None:
        """Call a function of int64 arguments."""
        self._run(*(str(number & (1 << 64) - 1) for number in (self._memory, function, *numbers)))


def use_arm(folder: Path) -> None:
    """Let all kernels of this process run on an Arm machine, each job on one thread."""
    machine = ArmMachine(folder)

    @functools.cache
    def address(function: Callable[..., None], *arguments: types.Type) -> int:
        return machine.load(compile_for_arm(function, *arguments))

    def call(self: Team, driver: Any, function: int, num_tasks: int, args: Struct) -> None:
        layout_of(type(args)).pack_into(self._packed, args)
        if self._recorded is not None:
            self._recorded.append(Job(driver, function, num_tasks, self._args.copy()))
        state, scratch, packed = self.addresses
        machine.call(driver_address(driver), state, scratch, function, packed, num_tasks)

    def replay(self: Team, program: Program) -> None:
        state, scratch, _ = self.addresses
        for driver, *job in program.table.tolist():
            machine.call(driver, state, scratch, *job)

    patch = pytest.MonkeyPatch()  # of the whole process
    patch.setattr(compiling, "_address", address)
    patch.setattr(Team, "_call", call)
    patch.setattr(Team, "replay", replay)


def pytest_configure(config: object) -> None:
    """Run the tests on the Arm machine: `pytest -p arm_emulation`."""
    use_arm(Path(os.environ[FOLDER_VARIABLE]))
