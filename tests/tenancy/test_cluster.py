"""The Secrets of a cluster deployment are created once and never changed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.cli.main import main
from moiety_platform.clock import SystemClock
from moiety_platform.cluster.pod_identity import PodIdentity
from moiety_platform.cluster.pool_scaler import StatefulSetScaler
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_podrun.fake_secrets_api import FakeSecretsApi

from .conftest import PEPPER

Run = Callable[..., str]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeSecretsApi]:
    with FakeSecretsApi(tmp_path / "account") as running:
        yield running


@pytest.fixture
def run(api: FakeSecretsApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`moiety cluster …` as in a pod; returns what it printed."""
    for name, value in api.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MOIETY_KEY_PEPPER", PEPPER.decode())

    def command(*arguments: str, ends_with: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["cluster", *arguments, "--account", str(api.folder)])
        printed = capsys.readouterr()
        assert ended.value.code == ends_with, printed
        return printed.out + printed.err

    return command


def entries(api: FakeSecretsApi, name: str) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in api.secrets[name]["data"].items()}


def store(api: FakeSecretsApi, name: str, **values: bytes) -> None:
    data = {key.replace("_", "-"): base64.b64encode(value).decode() for key, value in values.items()}
    api.secrets[name] = {"metadata": {"name": name, "resourceVersion": "7"}, "data": data}


def test_all_that_the_parts_share_is_made(api: FakeSecretsApi, run: Run) -> None:
    assert "pepper" in run("secrets", "shared", "--database-host", "rel-database")
    made = entries(api, "shared")
    assert len(bytes.fromhex(made["pepper"].decode())) == 32
    assert zmq.curve_public(made["curve-engine-secret"]) == made["curve-engine-public"]
    assert zmq.curve_public(made["curve-gateway-secret"]) == made["curve-gateway-public"]
    password = made["database-password"].decode()
    assert made["database-url"].decode() == f"postgresql://moiety:{password}@rel-database:5432/moiety"


def test_existing_secrets_are_never_changed_and_missing_ones_are_added(api: FakeSecretsApi, run: Run) -> None:
    store(api, "shared", pepper=b"as it was", mine=b"of somebody else")
    assert "pepper" not in run("secrets", "shared").partition("added:")[2]
    once = entries(api, "shared")
    assert (once["pepper"], once["mine"]) == (b"as it was", b"of somebody else")
    assert "traces-token" in once
    assert "database-password" not in once
    assert "added: nothing" in run("secrets", "shared")
    assert entries(api, "shared") == once


def test_an_incomplete_key_pair_is_reported_and_not_completed(api: FakeSecretsApi, run: Run) -> None:
    store(api, "shared", curve_engine_public=b"x" * 40)
    assert "add the secret key, or delete the public one" in run("secrets", "shared", ends_with=1)
    assert set(entries(api, "shared")) == {"curve-engine-public"}


def test_an_account_without_permission_is_reported(api: FakeSecretsApi, run: Run) -> None:
    api.refuses = {"create"}
    assert "Give its service account the role that the chart creates" in run("secrets", "shared", ends_with=1)
    assert api.secrets == {}


def test_outside_of_a_cluster_the_command_says_where_it_belongs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert "run this in a pod of the cluster" in run("secrets", "shared", ends_with=1)


async def role_of(database_url: str, key: str) -> str | None:
    database = Database.open(database_url)
    try:
        return (await Authenticator(database, PEPPER, SystemClock()).authenticate(f"Bearer {key}")).role
    finally:
        await database.close()


def test_the_first_owners_key_works_and_is_made_once(
    api: FakeSecretsApi, run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOIETY_DATABASE_URL", database_url)
    assert "is in the Secret owner" in run("owner", "owner")
    key = entries(api, "owner")["key"].decode()
    assert asyncio.run(role_of(database_url, key)) == "owner"
    assert "nothing was done" in run("owner", "owner")
    assert entries(api, "owner")["key"].decode() == key
    run("owner", "owner", "--reissue")
    again = entries(api, "owner")["key"].decode()
    assert again != key
    assert asyncio.run(role_of(database_url, again)) == "owner"


def test_a_key_that_could_not_be_kept_does_not_count(
    api: FakeSecretsApi, run: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOIETY_DATABASE_URL", database_url)
    api.refuses = {"create"}
    run("owner", "owner", ends_with=1)
    api.refuses = set()
    assert "is in the Secret owner" in run("owner", "owner"), "the store was left as it was"


@pytest.mark.parametrize("name", ["curve-engine-secret", "database-password"])
def test_an_invalid_entry_is_named_without_its_value(api: FakeSecretsApi, run: Run, name: str) -> None:
    api.store("shared", name, b"\xff a line of a file\n")
    said = run("secrets", "shared", "--database-host", "rel-database", ends_with=1)
    assert name in said and "a line of a file" not in said
    assert list(entries(api, "shared")) == [name]


def test_a_secret_that_is_added_to_keeps_what_others_have_written_on_it(api: FakeSecretsApi, run: Run) -> None:
    marks = {"labels": {"team": "a"}, "annotations": {"helm.sh/resource-policy": "keep"}}
    api.store("shared", "pepper", b"of before")
    api.secrets["shared"]["metadata"] |= marks
    api.secrets["shared"]["type"] = "example.com/shared"
    run("secrets", "shared")
    kept = api.secrets["shared"]
    assert entries(api, "shared")["pepper"] == b"of before" and "traces-token" in entries(api, "shared")
    assert {name: kept["metadata"].get(name) for name in marks} == marks
    assert kept["type"] == "example.com/shared"


async def test_gateways_scale_a_statefulset_and_say_what_forbids_it(api: FakeSecretsApi) -> None:
    api.scales["rel-engine"] = 1
    identity = PodIdentity.of(api.environment, api.folder)
    scaler = StatefulSetScaler(identity.url, identity.namespace, identity.token_file, identity.ca)
    assert await scaler.replicas("rel-engine") == 1
    await scaler.scale("rel-engine", 0)
    assert (api.scales["rel-engine"], await scaler.replicas("rel-engine")) == (0, 0)
    with pytest.raises(Unavailable, match=r"has no StatefulSet none \(404\): correct its name in the setting scaled_m"):
        await scaler.replicas("none")
    api.refuses.add("patch scale")
    with pytest.raises(Unavailable, match="the role that the chart creates"):
        await scaler.scale("rel-engine", 1)
    nobody = StatefulSetScaler("https://127.0.0.1:1", identity.namespace, identity.token_file, identity.ca)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await nobody.replicas("rel-engine")
    await scaler.close()
    await nobody.close()


async def test_a_token_that_cannot_be_read_is_reported_with_its_folder(api: FakeSecretsApi) -> None:
    identity = PodIdentity.of(api.environment, api.folder)
    for token_file in (api.folder / "gone", api.folder):  # missing, and not readable as a file
        scaler = StatefulSetScaler(identity.url, identity.namespace, token_file, identity.ca)
        with pytest.raises(Unavailable, match="token of the service account cannot be read"):
            await scaler.replicas("rel-engine")
        await scaler.close()
