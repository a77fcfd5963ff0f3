"""`moiety config check`: what is wrong with a file is said with its line, before anything is started with it."""

from __future__ import annotations

import pytest

from moiety_platform.cli.main import main
from moiety_platform.settings import GatewaySettings


@pytest.fixture
def check(tmp_path, capsys):
    def run(text: str, name: str = "moiety.toml", ends_with: int = 0) -> str:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["config", "check", str(path)])
        printed = capsys.readouterr()
        assert ended.value.code == ends_with, printed
        return printed.out + printed.err

    return run


def test_a_file_that_works_has_nothing_to_be_said_of_it(check) -> None:
    good = '[serve]\nport = 18000\nno_dashboard = true\n[gateway]\nlog_level = "info"\n[traces]\ntraces_port = 4319\n'
    assert "0 wrong, 0 warnings" in check(good)
    assert "0 wrong, 0 warnings" in check("gateway:\n  engines: [tcp://a:1]\n", "moiety.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gateway]\nprot = 8000\n", ":2: gateway.prot: is not known; did you mean 'port'?"),
        ("[gatway]\nport = 8000\n", ":1: gatway: no part reads this table; did you mean 'gateway'?"),
        ("[gateway]\nhost = 'h'\nport = 99999\n", ":3: gateway.port: Input should be less than or equal to 65535"),
        ("[gateway]\nlog_level = 'loud'\n", ":2: gateway.log_level: Input should be 'debug', 'info'"),
        ("[gateway]\nengines = ['tcp://a:1', 'tcp://a:1']\n", ":2: gateway.engines: an engine address is listed twice"),
        ("[gateway]\noidc_issuer = 'https://i'\n", ":1: gateway: set oidc_issuer and oidc_audience together"),
        ("[serve]\nbatchin = 'none'\n", ":2: serve.batchin: is not known"),
        (
            "[gateway]\nport = 1\n[traces]\ntraces_prt = 1\n",
            ":4: traces.traces_prt: is not known; did you mean 'traces_po",
        ),
        ("[gateway", "is not valid TOML"),
    ],
)
def test_what_would_not_work_is_said_with_its_line(check, text: str, said: str) -> None:
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
def test_secrets_in_plain_text_are_warned_of_and_not_shown(check, line: str, said: str) -> None:
    told = check(f"[gateway]\n{line}\n")
    assert said in told
    assert "long enough" not in told
    assert "word@" not in told


def test_what_passes_is_what_the_gateway_takes(check, tmp_path) -> None:
    check("[gateway]\nmax_body_bytes = 2048\n")
    assert GatewaySettings.load(tmp_path / "moiety.toml").max_body_bytes == 2048
