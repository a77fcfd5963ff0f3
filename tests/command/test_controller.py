"""`moiety controller` against a real gateway: custom resources become tenants, keys and limits, and say how it went."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import wait_for

from moiety_platform.cli.controller.custom_objects import CustomKind
from moiety_platform.cli.controller.custom_objects_api import CustomObjectsApi
from moiety_platform.cluster.pod_identity import PodIdentity

from .custom_objects_server import FakeCustomObjectsApi


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeCustomObjectsApi]:
    with FakeCustomObjectsApi(tmp_path / "account") as running:
        yield running


@pytest.fixture
def start_controller(serve: Any, api: FakeCustomObjectsApi, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Function that runs the command with these arguments until the end of the test, and returns its output."""
    processes: dict[Path, subprocess.Popen[bytes]] = {}

    def start(*arguments: str) -> Path:
        log = tmp_path / f"controller-{len(processes)}.log"
        command = [sys.executable, "-m", "moiety_platform.cli", "controller", "--account", str(api.folder), *arguments]
        environment = {**os.environ, **api.environment, "MOIETY_DATA_DIR": str(serve.data_dir)}
        with log.open("wb") as output:
            processes[log] = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        return log

    try:
        yield start
        assert all(process.poll() is None for process in processes.values()), [log.read_text() for log in processes]
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(timeout=30)


@pytest.fixture
def controller(start_controller: Callable[..., Path]) -> Path:
    """Output of the running command."""
    return start_controller()


def test_custom_resources_are_applied_after_each_change_and_removed_with_their_object(
    serve: Any, api: FakeCustomObjectsApi, controller: Path
) -> None:
    head = {"Authorization": f"Bearer {serve.admin_key}"}
    with httpx.Client(base_url=serve.url, headers=head, timeout=60, trust_env=False) as admin:

        def listed(what: str, **query: Any) -> list[dict[str, Any]]:
            return list(admin.get(f"/admin/v1/{what}", params=query).json()["data"])

        api.put("Tenant", "acme", {"weight": 2})
        api.put("ApiKey", "ci", {"tenant": "acme", "project": "web", "keySecret": "acme-ci"})
        api.put("Limit", "daily", {"tenant": "acme", "limits": {"tokens_per_day": 100000}})
        placed = (("Tenant", "acme"), ("ApiKey", "ci"), ("Limit", "daily"))
        wait_for(lambda: {api.condition(*one).get("status") for one in placed} == {"True"}, "all objects to be applied")
        (tenant,) = (one for one in listed("tenants") if one["name"] == "acme")
        assert tenant["weight"] == 2
        (limit,) = (one for one in listed("quotas") if one["scope_id"] == tenant["id"])
        assert (limit["kind"], limit["cap"]) == ("tokens_per_day", 100000)
        key = base64.b64decode(api.secrets["acme-ci"]["data"]["key"]).decode()
        body = {"model": serve_model(serve, key), "prompt": "1 2", "max_tokens": 2}
        answer = httpx.post(
            f"{serve.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, trust_env=False
        )
        assert answer.status_code == 200, answer.text

        api.put("Limit", "daily", {"tenant": "acme", "limits": {"tokens_per_day": 5}})
        wait_for(lambda: any(one["cap"] == 5 for one in listed("quotas")), "the changed limit")
        api.put("Tenant", "acme", {"weight": 3, "service_class": "gold"})
        wait_for(lambda: api.condition("Tenant", "acme").get("status") == "False", "a refusal")
        assert "gold" in api.condition("Tenant", "acme")["message"]
        api.remove("Limit", "daily")
        wait_for(lambda: api.condition("Tenant", "acme").get("status") == "False", "a refusal")
        api.put("Tenant", "acme", {"weight": 3})
        wait_for(lambda: api.condition("Tenant", "acme").get("status") == "True", "the corrected tenant")
        wait_for(lambda: not [one for one in listed("quotas") if one["scope_id"] == tenant["id"]], "no limit")
        api.remove("ApiKey", "ci")
        wait_for(
            lambda: (
                httpx.get(
                    f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False
                ).status_code
                == 401
            ),
            "the key to be revoked",
        )
    assert "Traceback" not in controller.read_text()
    assert api.num_watches >= 3


def test_a_deleted_key_and_tenant_stop_working_while_an_object_of_another_tenant_is_invalid(
    serve: Any, api: FakeCustomObjectsApi, controller: Path
) -> None:
    api.put("Tenant", "leaky", {})
    api.put("ApiKey", "leaked", {"tenant": "leaky", "keySecret": "leaked"})
    api.put("ApiKey", "second", {"tenant": "leaky", "keySecret": "second"})
    api.put("Limit", "bound", {"tenant": "leaky", "limits": {"tokens_per_day": 1000}})
    api.put("Tenant", "typist", {})
    wait_for(lambda: api.condition("ApiKey", "second").get("status") == "True", "the keys")
    keys = {name: base64.b64decode(api.secrets[name]["data"]["key"]).decode() for name in ("leaked", "second")}
    api.put("Limit", "typo", {"tenant": "typist", "key": "nothing", "limits": {"tokens_per_day": 1}})
    api.put("Limit", "typo-here", {"tenant": "leaky", "key": "nothing", "limits": {"tokens_per_day": 1}})
    wait_for(lambda: api.condition("Limit", "typo-here").get("status") == "False", "a refusal")
    assert [status_of(serve, key) for key in keys.values()] == [200, 200]
    api.remove("ApiKey", "leaked")
    api.remove("Limit", "bound")
    wait_for(lambda: status_of(serve, keys["leaked"]) == 401, "the key to be revoked")
    wait_for(lambda: "Not removed: limit leaky: tokens_per_day: Limit 'typo-here'" in controller.read_text(), "a line")
    assert status_of(serve, keys["second"]) == 200
    api.remove("Tenant", "leaky")
    wait_for(lambda: status_of(serve, keys["second"]) == 401, "the key of the deleted tenant to be revoked")
    wait_for(lambda: "no Tenant 'leaky'" in api.condition("ApiKey", "second").get("message", ""), "a condition")
    assert "Traceback" not in controller.read_text()


def test_a_key_is_created_only_with_its_limit_also_if_the_gateway_refuses_the_limit(
    serve: Any, api: FakeCustomObjectsApi, controller: Path
) -> None:
    api.put("Tenant", "bounded", {})
    api.put("Limit", "huge", {"tenant": "bounded", "limits": {"tokens_per_day": 2**63}})
    api.put("ApiKey", "waiting", {"tenant": "bounded", "keySecret": "waiting"})
    held = "while its Limit 'huge' is not applied"
    wait_for(lambda: held in api.condition("ApiKey", "waiting").get("message", ""), "the key to be held back")
    wait_for(lambda: "tokens_per_day" in api.condition("Limit", "huge").get("message", ""), "the refusal of the Limit")
    assert "waiting" not in api.secrets
    api.put("Limit", "huge", {"tenant": "bounded", "limits": {"tokens_per_day": 5}})
    wait_for(lambda: api.condition("ApiKey", "waiting").get("status") == "True", "the key")
    assert "waiting" in api.secrets


def test_the_owners_key_is_read_again_after_the_gateway_has_refused_it(
    serve: Any, api: FakeCustomObjectsApi, start_controller: Callable[..., Path], tmp_path: Path
) -> None:
    key_file = tmp_path / "admin-key"
    key_file.write_text("mty_not_the_key")
    log = start_controller("--url", serve.url, "--admin-key-file", str(key_file))
    api.put("Tenant", "rotated", {})
    wait_for(lambda: api.condition("Tenant", "rotated").get("status") == "False", "a refusal")
    key_file.write_text(serve.admin_key)
    wait_for(lambda: api.condition("Tenant", "rotated").get("status") == "True", "the new key to be used")
    assert "Traceback" not in log.read_text()


def test_a_watch_that_ends_on_any_error_is_started_again(api: FakeCustomObjectsApi) -> None:
    api.num_broken_watches = 3 * len(CustomKind)
    changed = threading.Event()
    with CustomObjectsApi(PodIdentity.of(api.environment, api.folder), retry_s=0.01) as objects:
        objects.watch(changed)
        assert wait_for(lambda: api.num_watches >= 4 * len(CustomKind), "further watches")


def status_of(serve: Any, key: str) -> int:
    head = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{serve.url}/v1/models", headers=head, trust_env=False).status_code


def serve_model(serve: Any, key: str) -> str:
    found = httpx.get(f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
    return str(json.loads(found.text)["data"][0]["id"])
