"""`moiety config check`: what is wrong with a file is said with its line, before anything is started with it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from moiety_platform.cli.config import differences_from, other_file_of
from moiety_platform.cli.main import main
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.settings import GatewaySettings
from moiety_wire.messages import ModelCard

from .conftest import StartGateway


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(text: str, name: str = "moiety.toml", ends_with: int = 0) -> str:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["config", "check", str(path)])
        printed = capsys.readouterr()
        assert ended.value.code == ends_with, printed
        return printed.out + printed.err

    return run


def test_config_check_reports_nothing_for_a_valid_file(check: Callable[..., str]) -> None:
    good = '[serve]\nport = 18000\nno_dashboard = true\n[gateway]\nlog_level = "info"\n[traces]\ntraces_port = 4319\n'
    assert "0 wrong, 0 warnings" in check(good)
    assert "0 wrong, 0 warnings" in check("gateway:\n  engines: [tcp://a:1]\n", "moiety.yaml")
    assert "0 wrong, 0 warnings" in check(
        "[engine]\nmax-running = 4\nkv_memory_bytes = '4GiB'\n[dashboard]\nport = 1\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\nprot = 8000\n", ":2: gateway.prot: is not known; did you mean 'port'?"),
        ("[gatway]\nport = 8000\n", ":1: gatway: no command reads this table; did you mean 'gateway'?"),
        ("[gateway]\nhost = 'h'\nport = 99999\n", ":3: gateway.port: Input should be less than or equal to 65535"),
        ("[gateway]\nlog_level = 'loud'\n", ":2: gateway.log_level: Input should be 'debug', 'info'"),
        ("[gateway]\nengines = ['tcp://a:1', 'tcp://a:1']\n", ":2: gateway.engines: an engine address is listed twice"),
        ("[gateway]\noidc_issuer = 'https://i'\n", ":1: gateway: set oidc_issuer and oidc_audience together"),
        ("[serve]\nbatchin = 'none'\n", ":2: serve.batchin: is not known"),
        ("[serve]\nport = 'x'\n", ":2: serve.port: Input should be a valid integer"),
        ("[engine]\nbatchin = 'none'\n", ":2: engine.batchin: is not known; did you mean 'batching'?"),
        ("[engine]\ntp = 1\nbatching = 'nono'\n", ":3: engine.batching: 'nono' is not one of 'none', 'static'"),
        ("[dashboard]\nport = 99999\n", ":2: dashboard.port: Input should be less than or equal to 65535"),
        (
            "[gateway]\nport = 1\n[traces]\ntraces_prt = 1\n",
            ":4: traces.traces_prt: is not known; did you mean 'traces_po",
        ),
        ("[gateway", "is not valid TOML"),
    ],
)
def test_config_check_reports_errors_with_their_lines(check: Callable[..., str], text: str, said: str) -> None:
    assert said in check(text, ends_with=1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "key_pepper = 'a pepper that is long enough'",
            "a secret in plain text: give it in the environment, as",
        ),
        ("database_url = 'postgresql://me:word@db/x'", "a password in plain text: give the address in the environment"),
    ],
)
def test_secrets_in_plain_text_are_warned_of_and_not_shown(check: Callable[..., str], line: str, said: str) -> None:
    told = check(f"[gateway]\n{line}\n")
    assert said in told
    assert "long enough" not in told
    assert "word@" not in told


async def test_a_file_is_compared_with_the_gateway_that_runs(
    start_gateway: StartGateway, card: ModelCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "moiety.yaml"
    file.write_text("gateway: {max_choices: 3, port: 1, max_tools: 5, log_level: info}")
    async with start_gateway([FakeEngineClient(card)], max_tools=9) as gateway:

        async def run(*arguments: str) -> str:
            def main_ends() -> None:
                with pytest.raises(SystemExit):
                    main(["config", *arguments, "--url", gateway.url, "--admin-key", gateway.admin_key, "--json"])

            await asyncio.to_thread(main_ends)
            return capsys.readouterr().out

        told = json.loads(await run("check", str(file), "--against", "running"))
        found = {one["name"]: (one["now"], one["then"], one["taken"]) for one in told["differences"]}
        reads_none = "never: the gateway reads no configuration file; start it with --config"
        assert found == {
            "max_choices": (16, 3, reads_none),
            "max_tools": (9, 5, "never: the gateway's option overrides the file"),
            "port": (8000, 1, reads_none),
        }
        rows = json.loads(await run("show"))["data"]
        found = {one.name: (one.now, one.then, one.taken) for one in differences_from(file, rows, reads_file=True)}
        assert found == {
            "max_choices": (16, 3, "at once"),
            "max_tools": (9, 5, "never: the gateway's option overrides the file"),
            "port": (8000, 1, "at a restart"),
        }
        shown = json.loads(await run("show"))
        assert {one["name"]: one["value"] for one in shown["data"]}["max_tools"] == 9


def test_a_file_that_the_gateway_does_not_read_is_told_from_the_one_that_it_reads(tmp_path: Path) -> None:
    assert other_file_of(tmp_path / "one", str(tmp_path / "two")) == str(tmp_path / "two")
    assert other_file_of(tmp_path / "one", str(tmp_path / "one")) is None
    assert other_file_of(tmp_path / "one", None) is None


def test_config_check_accepts_exactly_what_the_gateway_accepts(check: Callable[..., str], tmp_path: Path) -> None:
    check("[gateway]\nmax_body_bytes = 2048\n")
    assert GatewaySettings.load(tmp_path / "moiety.toml").max_body_bytes == 2048


def test_an_engine_takes_its_table_of_the_file_below_its_variables_and_options(tmp_path: Path) -> None:
    file = tmp_path / "moiety.yaml"
    file.write_text(
        "engine: {scripted: true, listen: 'tcp://127.0.0.1:0', max-context-tokens: 777, name: of-the-file}\n"
    )
    words = [sys.executable, "-m", "moiety_platform.cli", "engine", "--config", str(file)]

    def ready(*options: str, **variables: str) -> tuple[str, int]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        with subprocess.Popen([*words, *options], env=environment, stdout=PIPE, stderr=DEVNULL) as process:
            told = json.loads(process.stdout.readline())
            process.kill()
        return told["model"], told["max_context_tokens"]

    assert ready() == ("of-the-file", 777)
    assert ready(MOIETY_ENGINE_NAME="of-the-environment") == ("of-the-environment", 777)
    assert ready("--name", "of-the-option", MOIETY_ENGINE_NAME="of-the-environment") == ("of-the-option", 777)


def test_an_engine_refuses_a_table_with_a_name_that_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "moiety.toml"
    file.write_text("[engine]\nbatchin = 'none'\n")
    with pytest.raises(SystemExit) as ended:
        main(["engine", "--config", str(file)])
    assert ended.value.code == 2
    assert "has unknown settings: batchin;" in " ".join(capsys.readouterr().err.replace("│", " ").split())
