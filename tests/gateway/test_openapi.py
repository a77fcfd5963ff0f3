"""The OpenAPI documents against the gateway that serves them, by schemathesis: what they allow is taken, what they do not
is refused, and every answer is one that they tell of.

With `MOIETY_OPENAPI_EXAMPLES=300` it searches for long; without, it tries the same few requests each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient

EXAMPLES = os.environ.get("MOIETY_OPENAPI_EXAMPLES")
SEARCH = (
    ["--max-examples", EXAMPLES] if EXAMPLES else ["--max-examples", "4", "--seed", "1", "--generation-deterministic"]
)
HOOKS = Path(__file__).with_name("openapi_hooks.py")


@pytest.mark.timeout(3600 if EXAMPLES else 300)
@pytest.mark.parametrize("part", ["public", "admin"])
async def test_the_api_is_what_its_document_says(start_gateway, new_card, tmp_path, part):
    async with start_gateway([FakeEngineClient(new_card(embedding_width=8))], stores_usage=True) as gateway:
        status, output, answered = await run_schemathesis(gateway, part, tmp_path)
    assert status == 0, output
    operations = {f"{line}" for line in answered}
    print(sorted(operations))


async def run_schemathesis(gateway, part, tmp_path):
    """The exit status, what it printed, and how often each operation was answered with each status."""
    answered = tmp_path / "answered.json"
    key = gateway.admin_key if part == "admin" else gateway.key
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/schema/{part}.json"]
    options = ["--header", f"Authorization: Bearer {key}", "--exclude-checks", "positive_data_acceptance", "--no-color"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *options,
        *SEARCH,
        cwd=tmp_path,
        env={
            **os.environ,
            "SCHEMATHESIS_HOOKS": str(HOOKS),
            "MOIETY_URL": gateway.url,
            "MOIETY_KEY": gateway.key,
            "MOIETY_ADMIN_KEY": gateway.admin_key,
            "MOIETY_ANSWERED": str(answered),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode(), json.loads(answered.read_text())
