from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import structlog
import typer
import zmq
from typer.testing import CliRunner

from moiety_engine.cli import engine
from moiety_wire.codec import decode_to_gateway, encode
from moiety_wire.messages import Accepted, Hello

PROGRAM = "import typer; from moiety_engine.cli import engine; typer.run(engine)"
DEADLINE_S = 60


@contextmanager
def running_engine(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, "MOIETY_ENGINE_LISTEN": "tcp://127.0.0.1:0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def read(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.read()


def test_the_scripted_engine_says_when_it_is_ready_and_ends_with_zero_when_told(tmp_path: Path, submit: Any) -> None:
    address_file = tmp_path / "address"
    with (
        running_engine(
            "--scripted", "--address-file", str(address_file), "--tool-format", "kimi_k2", MOIETY_ENGINE_NAME="echo"
        ) as (
            process,
            ready,
        ),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        assert (ready["event"], ready["model"]) == ("engine_ready", "echo")
        assert address_file.read_text().strip() == ready["address"]
        assert not ready["address"].endswith(":0")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, DEADLINE_S * 1000)
        socket.connect(ready["address"])
        socket.send(encode(Hello("gateway")))
        messages = (message for _ in itertools.count() for message in decode_to_gateway(socket.recv()))
        card = next(messages)
        assert (card.model, card.tool_format, card.reasoning_format) == ("echo", "kimi_k2", "auto")
        socket.send(encode(submit(model="echo", prompt="a secret prompt", credit_tokens=1)))
        assert any(isinstance(message, Accepted) for message in messages)
        process.send_signal(signal.SIGTERM)
        assert any(getattr(message, "draining", False) for message in messages)
        process.send_signal(signal.SIGTERM)  # the second does not wait for what is open
        assert process.wait(DEADLINE_S) == 0
        logs = read(process.stderr)
        assert "engine_draining" in logs
        assert "secret" not in logs


def test_importing_the_command_imports_no_torch_and_no_web_stack() -> None:
    check = "import sys, moiety_engine.cli; print([m for m in ('torch', 'litestar', 'sqlalchemy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/folder"], "neither a folder nor a hub id"),
        (["--model", "."], "config.json"),
        (["--scripted", "--curve-key-file", "/nonexistent/key"], "cannot be read"),
        (["--scripted", "--gateway-keys-file", "/nonexistent/keys"], "needs --curve-key-file"),
        (["--scripted", "--listen", "tcp://0.0.0.0:5757"], "without --curve-key-file and --gateway-keys-file"),
        (["--scripted", "--listen", "tcp://*:5757", "--curve-key-file", "k"], "without --gateway-keys-file a machine"),
        (["--scripted", "--listen", "tcp://[::]:5757"], "set --allow-unauthenticated-tcp"),
        (["--scripted", "--tool-format", "qwen"], "--tool-format 'qwen' is not known; use auto, cohere_command, "),
        (["--scripted", "--reasoning-format", "no"], "--reasoning-format 'no' is not known; use auto, apertus, "),
        (["--model", ".", "--role", "decode", "--kv-listen", "tcp://10.0.0.1:5758"], "--kv-listen tcp://10.0.0.1:5758"),
        (["--scripted", "--unacknowledged-usage", "/dev/null/file"], "cannot be written"),
        (["--scripted", "--metrics-listen", "nowhere"], "is not host:port"),
        (["--scripted", "--metrics-listen", "203.0.113.1:9400"], "choose another"),
        (["--max-running", "0"], "max-running"),
        (["--kv-memory-bytes", "lots", "--scripted"], "is not a size"),
    ],
)
def test_wrong_options_end_with_2_and_say_what_to_do(arguments: list[str], words: str) -> None:
    app = typer.Typer()
    app.command()(engine)
    try:
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    finally:
        structlog.reset_defaults()  # the command is an entry point: it had sent the logs to the runner's stream
    assert result.exit_code == 2
    assert words in result.output


def test_an_address_that_cannot_be_had_ends_with_1() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--scripted", "--listen", "tcp://127.0.0.1:notaport"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert "cannot listen" in found.stderr
