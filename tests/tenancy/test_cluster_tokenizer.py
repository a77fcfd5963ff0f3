"""Gateways of engines that are not Moiety's get the tokenizer from the hub, without the weights."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.server_thread import serving_in_thread

import moiety_demo

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "acme/model"
DEMO = Path(moiety_demo.checkpoint_path())
FILES = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.suffix in (".json", ".jinja")}
BROKEN = {"tokenizer.json": b"{}", "config.json": b"{}"}


class FakeHub(ThreadingHTTPServer):
    """A hub with one model, whose `files` include weights. `requested` has the paths of all requests."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {**files, "model.safetensors": b"weights"}
        self.requested: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requested.append(path)
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.server.files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif path.startswith(f"/api/models/{MODEL}"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self._send(json.dumps({"id": MODEL, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/{MODEL}/resolve/{COMMIT}/") and path.rpartition("/")[2] in self.server.files:
            self._send(self.server.files[path.rpartition("/")[2]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[FakeHub]:
    """A hub that answers, with the demo model's text files or those of the parameter."""
    with serving_in_thread(FakeHub(getattr(request, "param", FILES))) as server:
        yield server


def download(url: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process, since the library reads its address once."""
    cache = folder.parent / "cache"
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "moiety_platform.cli", "cluster", "tokenizer", *arguments, str(folder)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def test_the_text_files_of_a_model_are_downloaded_and_its_weights_are_not(hub: FakeHub, tmp_path: Path) -> None:
    done = download(hub.url, tmp_path / "model", "--revision=v1", MODEL)
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir() if path.is_file()}
    assert {name: found[name] for name in FILES} == FILES
    assert "model.safetensors" not in found
    assert any(path.endswith("/revision/v1") for path in hub.requested)
    assert not any("safetensors" in path for path in hub.requested)


@pytest.mark.parametrize("hub", [BROKEN], indirect=True)
def test_files_without_a_usable_tokenizer_are_refused_before_the_gateway_starts(hub: FakeHub, tmp_path: Path) -> None:
    done = download(hub.url, tmp_path / "model", MODEL)
    assert done.returncode == 1
    assert f"{MODEL} has no tokenizer that the gateway can use" in done.stderr


def test_an_unknown_model_and_a_hub_that_is_not_there_are_told_apart(hub: FakeHub, tmp_path: Path) -> None:
    unknown = download(hub.url, tmp_path / "model", "acme/other")
    assert unknown.returncode == 1
    assert "check the id, the revision and, for a gated model, HF_TOKEN" in unknown.stderr
    absent = download("http://127.0.0.1:9", tmp_path / "model", MODEL)
    assert absent.returncode == 1
    assert "the hub is not reachable for acme/model" in absent.stderr
