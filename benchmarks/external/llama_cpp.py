"""llama.cpp's server and benchmark, built from source in a separate folder, with the checkpoint in GGUF.

PyPI has the source: in the archive of llama-cpp-python, with the server and the converter. cmake and ninja come from
PyPI too; a C++ compiler must be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from external.processes import CONTEXT_TOKENS, MODEL, Server, process, wait
from moiety_platform.engine_addresses import ExternalKind
from moiety_platform.supervisor.ports import claim_port

ARCHIVE = "llama-cpp-python==0.3.36"
TOOLS = ["cmake==3.31.6", "ninja==1.11.1.4"]
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # which would be downloaded
}
NUM_SLOTS = 4


@contextmanager
def serve(
    work: Path, checkpoint: Path, folder: Path, threads: int, context_tokens: int = CONTEXT_TOKENS
) -> Iterator[tuple[Server, str]]:
    """Build llama.cpp and convert the checkpoint if needed; yield (the server, its version)."""
    binary, file = prepare(work, checkpoint, "llama-server", threads)
    port = claim_port("127.0.0.1", 0, "--port")
    command = [binary, "--model", file, "--alias", MODEL, "--host", "127.0.0.1", "--port", port, "--metrics"]
    command += ["--parallel", NUM_SLOTS, "--ctx-size", NUM_SLOTS * context_tokens, "--threads", threads]
    url = f"http://127.0.0.1:{port}"
    address = f"openai+{url}/v1?model={MODEL}&kind={ExternalKind.LLAMA_CPP}&tokenizer={checkpoint}"
    with process(command, folder / "server.log", {}) as running:
        wait(f"{url}/health", running, folder / "server.log")
        yield Server(ExternalKind.LLAMA_CPP, url, running, address), f"{ARCHIVE} ({_version(binary)})"


def prepare(work: Path, checkpoint: Path, program: str, threads: int) -> tuple[Path, Path]:
    """Return one of llama.cpp's programs, and the converted checkpoint."""
    home = work / "llama_cpp"
    return _build(home, program, threads), _convert(home, checkpoint)


def _build(home: Path, program: str, threads: int) -> Path:
    binary, tools = home / "build" / "bin" / program, home / "tools" / "bin"
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    if not (home / "installed").exists():
        venv.create(tools.parent, with_pip=True, clear=True)
        pip = [str(tools / "python"), "-m", "pip", "-q"]
        subprocess.run([*pip, "install", *TOOLS], check=True)
        download = ["download", "--no-deps", "--no-binary", ":all:", "--dest", str(home), ARCHIVE]
        subprocess.run([*pip, *download], check=True)
        with tarfile.open(next(home.glob("*.tar.gz"))) as archive:
            archive.extractall(home, filter="data")
        options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
        configure: list[str | Path] = ["cmake", "-S", _source(home), "-B", home / "build", "-G", "Ninja", *options]
        subprocess.run(configure, check=True, env=environment, stdout=sys.stderr)
        (home / "installed").touch()
    if not binary.exists():
        print(f"building {program} from the source in {ARCHIVE}; some minutes the first time", file=sys.stderr)
        build: list[str | Path] = ["cmake", "--build", home / "build", "--target", program, "--parallel", str(threads)]
        subprocess.run(build, check=True, env=environment, stdout=sys.stderr)
    return binary


def _source(home: Path) -> Path:
    return next(home.glob("llama_cpp_python-*/vendor/llama.cpp"))


def _convert(home: Path, checkpoint: Path) -> Path:
    """Convert the checkpoint to a file named for its folder."""
    file = home / f"{checkpoint.name}.gguf"
    if not file.exists():
        partial = file.with_suffix(".partial.gguf")
        script = Path(__file__).with_name("to_gguf.py")
        subprocess.run([sys.executable, script, _source(home), checkpoint, partial], check=True)
        partial.rename(file)
    return file


def _version(binary: Path) -> str:
    """Return its first line: `version: 0.5.0-dev (build 1, commit 0c1e5709)`."""
    done = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True)
    return next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version"))
