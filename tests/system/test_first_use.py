"""A new user needs only what `moiety serve` prints."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from typing import Any
from urllib.parse import urlsplit

import pytest

DEADLINE_S = 120


def test_the_printed_command_answers_a_task_rightly(server: Any) -> None:
    command = server.printed(r"^(curl (?:.*\\\n)*.*)$")
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=DEADLINE_S)
    answer = json.loads(done.stdout)
    asked = re.search(r"What is (\d+) \+ (\d+)\?", command)
    assert asked is not None, command
    assert answer["choices"][0]["message"]["content"].strip() == str(int(asked[1]) + int(asked[2]))


def test_the_line_that_says_ready_comes_after_everything_else_one_needs(server: Any) -> None:
    before = server.output.partition("moiety is ready at")[0]
    for needed in ("curl ", "admin key ", "tenant key ", "API ", server.model):
        assert needed in before
    assert len(re.findall(r"mty_[A-Za-z0-9]+\.[A-Za-z0-9]+", before)) >= 2


def test_the_default_keys_are_those_printed(server: Any) -> None:
    """An administrator may look and not generate; the tenant may generate and not look."""
    headers = {"Authorization": f"Bearer {server.key('tenant')}"}
    body = {"model": server.model, "prompt": "hello", "max_tokens": 2}
    assert server.admin.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert server.admin.post("/v1/completions", json=body).status_code == 403
    assert server.admin.get("/admin/v1/engines", headers=headers).status_code == 403


def test_no_prompt_and_no_key_reaches_a_log_or_the_disk(server: Any, account: Any) -> None:
    word = "quokkaxyzzy"
    asked = {"model": server.model, "messages": [{"role": "user", "content": word}], "max_tokens": 2}
    assert account.post("/v1/chat/completions", asked).status_code == 200
    for fault in ({"temperature": word}, {"messages": [{"role": word}]}, {"n": [account.secret]}):
        assert account.post("/v1/chat/completions", asked | fault).status_code in (400, 404)
    rows = account.settled_rows(4)
    assert any(row["outcome"] == "rejected" for row in rows)
    secret = account.secret.partition(".")[2]
    places = [server.log, *(path for path in server.data_dir.rglob("*") if path.is_file())]
    assert len(places) > 3
    for place in places:
        content = place.read_bytes()
        assert word.encode() not in content, place
        assert secret.encode() not in content, place


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: \xff\xfe\r\nConnection: close\r\n\r\n",
        b"GET /v1/models/%00%ff HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X-A: " + b"a" * 200_000 + b"\r\nConnection: close\r\n\r\n",
    ],
    ids=["no HTTP", "TLS", "negative length", "bad chunk", "bad header", "bad path", "long path", "long header"],
)
def test_malformed_requests_are_refused_or_their_connection_closed(server: Any, request_bytes: bytes) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE_S) as connection:
        try:
            connection.sendall(request_bytes)
            answer = connection.recv(4096)
        except ConnectionError:
            answer = b""
    assert not answer or re.match(rb"HTTP/1\.1 4\d\d ", answer), answer
    assert server.admin.get("/readyz").status_code == 200
