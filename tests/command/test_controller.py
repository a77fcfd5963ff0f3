"""`moiety controller` against a real gateway: custom resources become tenants, keys and limits, and say how it went."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import wait_for

from moiety_platform.cli.controller.custom_objects import CustomKind, CustomObject, declarations_of, new_condition

from .custom_objects_server import FakeCustomObjectsApi

TENANT, KEY, LIMIT = CustomKind.TENANT, CustomKind.API_KEY, CustomKind.LIMIT


def custom(kind: CustomKind, name: str, /, **spec: Any) -> CustomObject:
    return CustomObject(kind, name, 1, spec)


def test_objects_become_the_entries_of_a_file_and_each_part_knows_its_object() -> None:
    made = declarations_of(
        [
            custom(LIMIT, "per-day", tenant="acme", limits={"tokens_per_day": 9, "dollars_per_month": "5"}),
            custom(LIMIT, "of-web", tenant="acme", project="web", limits={"requests_per_minute": 6}),
            custom(LIMIT, "of-ci", tenant="acme", key="ci", limits={"concurrent_requests": 2}),
            custom(KEY, "ci", tenant="acme", project="web", keySecret="acme-ci", models=["m"]),
            custom(KEY, "other", tenant="acme", keySecret="acme-other"),
            custom(TENANT, "acme", weight=2, models=["m"]),
        ]
    )
    assert made.problems == {}
    assert {f"{kind} {name}": owner for (kind, name), owner in made.owners.items()} == {
        "tenant acme": (TENANT, "acme"),
        "project acme/web": (KEY, "ci"),
        "project acme/default": (KEY, "other"),
        "key acme/web/ci": (KEY, "ci"),
        "key acme/default/other": (KEY, "other"),
        "limit acme: tokens_per_day": (LIMIT, "per-day"),
        "limit acme: money_per_month": (LIMIT, "per-day"),
        "limit acme/web: requests_per_minute": (LIMIT, "of-web"),
        "limit acme/web/ci: concurrent_requests": (LIMIT, "of-ci"),
    }


@pytest.mark.parametrize(
    ("objects", "ref", "words"),
    [
        ([custom(KEY, "k", tenant="none", keySecret="s")], (KEY, "k"), "no Tenant 'none'"),
        ([custom(TENANT, "a"), custom(LIMIT, "l", tenant="a", key="k", limits={})], (LIMIT, "l"), "no ApiKey 'k'"),
        ([custom(TENANT, "a", name="x"), custom(TENANT, "b", name="x")], (TENANT, "b"), "has the same name 'x'"),
        ([custom(TENANT, "a", wieght=2)], (TENANT, "a"), "wieght"),
        (
            [
                custom(TENANT, "a"),
                custom(LIMIT, "l", tenant="a", limits={"tokens_per_day": 1}),
                custom(LIMIT, "m", tenant="a", limits={"tokens_per_day": 2}),
            ],
            (LIMIT, "m"),
            "limits tokens_per_day there already",
        ),
    ],
)
def test_an_object_that_cannot_be_applied_is_told_why_and_others_are_applied(
    objects: list[CustomObject], ref: Any, words: str
) -> None:
    made = declarations_of([*objects, custom(TENANT, "fine")])
    assert words in made.problems[ref]
    assert ("tenant", "fine") in made.owners


def test_a_condition_is_written_only_when_it_changes() -> None:
    one = custom(TENANT, "a")
    first = new_condition(one, "", "2026-01-01T00:00:00Z")
    assert first is not None and (first["status"], first["reason"]) == ("True", "Applied")
    known = CustomObject(TENANT, "a", 1, {}, (first,))
    assert new_condition(known, "", "2026-01-02T00:00:00Z") is None
    newer = new_condition(CustomObject(TENANT, "a", 2, {}, (first,)), "", "2026-01-02T00:00:00Z")
    assert newer is not None and newer["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    failed = new_condition(known, "no", "2026-01-02T00:00:00Z")
    assert failed is not None
    assert (failed["status"], failed["message"], failed["lastTransitionTime"]) == (
        "False",
        "no",
        "2026-01-02T00:00:00Z",
    )


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeCustomObjectsApi]:
    with FakeCustomObjectsApi(tmp_path / "account") as running:
        yield running


@pytest.fixture
def controller(serve: Any, api: FakeCustomObjectsApi, tmp_path: Path) -> Iterator[Path]:
    """Run the command until the end of the test; its output."""
    log = tmp_path / "controller.log"
    command = [sys.executable, "-m", "moiety_platform.cli", "controller", "--account", str(api.folder)]
    environment = {**os.environ, **api.environment, "MOIETY_DATA_DIR": str(serve.data_dir)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield log
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(timeout=30)


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


def serve_model(serve: Any, key: str) -> str:
    found = httpx.get(f"{serve.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
    return str(json.loads(found.text)["data"][0]["id"])
