"""vLLM's CPU build, installed from PyPI into a separate environment, with priority scheduling."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpu_rivals import VLLM, install_vllm

from external.processes import CONTEXT_TOKENS, MODEL, Server, process, wait
from moiety_platform.engine_addresses import ExternalKind
from moiety_platform.supervisor.ports import claim_port

FLAGS = ["--enforce-eager", "--enable-prompt-tokens-details", "--scheduling-policy", "priority"]


@contextmanager
def serve(
    work: Path,
    checkpoint: Path,
    folder: Path,
    threads: int,
    context_tokens: int = CONTEXT_TOKENS,
    flags: Sequence[str] = FLAGS,
) -> Iterator[tuple[Server, str]]:
    """Install vLLM if needed; yield (the server, its version)."""
    python = install_vllm(work / "vllm")
    port = claim_port("127.0.0.1", 0, "--port")
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", MODEL]
    command += ["--port", port, "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", context_tokens]
    command += flags
    url = f"http://127.0.0.1:{port}"
    address = f"openai+{url}/v1?model={MODEL}&kind={ExternalKind.VLLM}&tokenizer={checkpoint}&priority=on"
    with process(command, folder / "server.log", environment) as running:
        wait(f"{url}/health", running, folder / "server.log")
        yield Server(ExternalKind.VLLM, url, running, address), VLLM
