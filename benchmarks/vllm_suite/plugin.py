"""pytest plugin that lets vLLM's tests of its HTTP API run without vLLM, against servers of Moiety.

`tests.utils.RemoteOpenAIServer` starts a gateway that serves the model's name, with the demo model, or with the
scripted engine for the files of SCRIPTED, which need a model that reasons and calls tools. Whatever is imported from
vLLM is a placeholder, and tests that name one are skipped, since they test vLLM's own code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import anthropic
import httpx
import openai
import pytest
import requests
from external.processes import MOIETY, process, wait

from moiety_platform.supervisor.ports import claim_port

SCRIPTED = ("responses/", "messages", "function_calling", "include_reasoning", "thinking_token_budget")
ABSENT = ("vllm", "openai_harmony", "fastapi", "pybase64")
OUTCOMES_FILE = "MOIETY_VLLM_OUTCOMES"
_OWN_CODE = "tests vLLM's own code"


class Placeholder:
    """Anything of a package that is not installed."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **_options: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], FunctionType):
            return arguments[0]  # it decorates the function
        return Placeholder(f"{self.__name__}()")

    def __add__(self, other: Any) -> Any:
        return other  # options of vLLM's server, which Moiety's has not

    __radd__ = __add__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)


class PlaceholderModule(ModuleType):
    """Module whose attributes are placeholders."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of modules in absent packages."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


class Servers:
    """Gateways of the session by kind and model; ended with it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._running: dict[tuple[bool, str], tuple[str, str]] = {}

    def address(self, model: str, *, scripted: bool) -> tuple[str, str]:
        """Return the URL of the gateway and a tenant's key."""
        if (scripted, model) not in self._running:
            self._running[scripted, model] = self._start(model, scripted)
        return self._running[scripted, model]

    def _start(self, model: str, scripted: bool) -> tuple[str, str]:
        folder = self._folder / str(len(self._running))
        folder.mkdir()
        port = claim_port("127.0.0.1", 0, "--port")
        keys = folder / "keys.json"
        if scripted:
            command = [sys.executable, "-m", "clients.scripted_server", "--model", model, "--keys", keys]
            command += ["--data", folder / "data", "--port", port]
        else:
            command = [sys.executable, "-c", MOIETY, "serve", "--name", model, "--no-dashboard", "--no-traces"]
            command += ["--data-dir", folder, "--port", port]
        running = self._stack.enter_context(process(command, folder / "log", {}))
        wait(f"http://127.0.0.1:{port}/readyz", running, folder / "log")
        return f"http://127.0.0.1:{port}", str(json.loads(keys.read_text())["tenant_key"])

    def close(self) -> None:
        self._stack.close()


SERVERS = Servers()


class NamingClient(openai.AsyncOpenAI):  # type: ignore[misc]
    """Client that names the model in requests for responses without one: vLLM's server needs no name."""

    model = ""

    async def _prepare_options(self, options: Any) -> Any:
        body = options.json_data
        if options.url == "/responses" and isinstance(body, dict) and not body.get("model"):
            options.json_data = {**body, "model": self.model}
        return await super()._prepare_options(options)


class RemoteOpenAIServer:
    """Gateway in place of a vLLM server."""

    def __init__(self, model: str, arguments: Sequence[str], **_options: Any) -> None:
        file, arguments = os.environ["PYTEST_CURRENT_TEST"], list(map(str, arguments))
        if "--served-model-name" in arguments:
            model = arguments[arguments.index("--served-model-name") + 1]
        self._url, self.DUMMY_API_KEY = SERVERS.address(model, scripted=any(part in file for part in SCRIPTED))
        self._model = model
        _send_keys(self._url, self.DUMMY_API_KEY)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the gateway to later modules."""

    @property
    def url_root(self) -> str:
        return self._url

    def url_for(self, *parts: str) -> str:
        return "/".join([self._url, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self._url}/v1", api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        client = NamingClient(base_url=f"{self._url}/v1", api_key=self.DUMMY_API_KEY, max_retries=0, **options)
        client.model = self._model
        return client

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self._url, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


_KEYS: dict[str, str] = {}  # by the URL of a gateway


def _send_keys(url: str, key: str) -> None:
    """Send the key with requests of HTTP clients that have none: vLLM's server needs none."""
    if not _KEYS:
        _patch_clients()
    _KEYS[url] = key


def _patch_clients() -> None:
    send_requests, send, send_async = requests.Session.send, httpx.Client.send, httpx.AsyncClient.send

    def with_key(request: Any) -> Any:
        key = next((key for url, key in _KEYS.items() if str(request.url).startswith(url)), None)
        if key is not None and not {"authorization", "x-api-key"} & {name.lower() for name in request.headers}:
            request.headers["Authorization"] = f"Bearer {key}"
        return request

    requests.Session.send = lambda self, request, **more: send_requests(self, with_key(request), **more)  # type: ignore[method-assign]
    httpx.Client.send = lambda self, request, **more: send(self, with_key(request), **more)  # type: ignore[method-assign]
    httpx.AsyncClient.send = lambda self, request, **more: send_async(self, with_key(request), **more)  # type: ignore[method-assign]


def pytest_configure() -> None:
    sys.meta_path.append(PlaceholderFinder(*ABSENT))
    utils = PlaceholderModule("tests.utils")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    sys.modules["tests.utils"] = utils


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "function", None)
        if function is not None and _names_of(function.__code__) & _placeholders_of(function.__globals__):
            item.add_marker(pytest.mark.skip(reason=_OWN_CODE))


def _names_of(code: CodeType) -> set[str]:
    """Return the global names that a function uses, those of the functions in it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))


def _placeholders_of(names: dict[str, Any]) -> set[str]:
    return {name for name, value in names.items() if isinstance(value, Placeholder | PlaceholderModule)}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write one line for each outcome."""
    if report.when != "call" and report.outcome == "passed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    told = crash.message if crash is not None else str(report.longrepr or "")
    outcome = "skipped" if report.failed and "Placeholder" in told else report.outcome
    line = {"test": report.nodeid, "outcome": outcome, "detail": told}
    with Path(os.environ[OUTCOMES_FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_sessionfinish() -> None:
    SERVERS.close()
