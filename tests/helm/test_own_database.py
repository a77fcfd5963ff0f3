"""An external database: a Job migrates it before any pod starts, and a failed Job stops the release."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from moiety_migrations import HEAD

from .running import NEEDS_ROOT, Running, running

VALUES = """
podDefaults: {fixedUser: false}
networkPolicies: {enabled: true}
database: {bundled: {enabled: false}, existingSecret: own}
gateway: {replicas: 1, deregisterSeconds: 1, drainSeconds: 5}
dashboard: {enabled: false}
engines: [{name: demo, drainSeconds: 5, options: {scripted: true}}]
"""
NEWER = "9999"

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(420), NEEDS_ROOT]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("own"), VALUES, "--database", "own") as found:
        yield found


def revision(release: Running, change: str = "") -> str:
    """Return the revision of the database, after the change to it if one is given."""
    code = (
        "import psycopg\n"
        f"with psycopg.connect({release.secret('own', 'url')!r}, autocommit=True) as connection:\n"
        f"    {f'connection.execute({change!r})' if change else 'pass'}\n"
        "    print(connection.execute('SELECT version_num FROM alembic_version').fetchone()[0])\n"
    )
    done = release.run_inside("gateway", code)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def is_served(release: Running) -> bool:
    answer = httpx.get(f"{release.url}/readyz", timeout=30, trust_env=False)
    as_owner = {"Authorization": f"Bearer {release.owner_key}"}
    listed = httpx.get(f"{release.url}/admin/v1/tenants", headers=as_owner, timeout=30, trust_env=False)
    return (answer.status_code, listed.status_code) == (httpx.codes.OK, httpx.codes.OK)


def test_a_job_migrates_the_database_before_the_pods_start(release: Running) -> None:
    (log,) = (release.folder / "pods").glob("rel-moiety-migrate-*/*.log")
    assert HEAD in log.read_text()
    assert revision(release) == HEAD
    assert is_served(release)
    parts = [one["part"] for one in release.pods()]
    assert sorted(parts) == ["database", "engine-demo", "gateway", "traces"]


@pytest.mark.thorough
def test_a_migration_that_fails_stops_the_upgrade_and_what_runs_serves_on(release: Running) -> None:
    before = release.pods()
    assert revision(release, f"UPDATE alembic_version SET version_num = '{NEWER}'") == NEWER
    release.upgrade()
    release.wait_for("the upgrade failed: migrate of rel-moiety-migrate")
    assert release.pods() == before
    assert is_served(release)
    assert revision(release, f"UPDATE alembic_version SET version_num = '{HEAD}'") == HEAD
    release.upgrade()
    release.wait_for("everything was rolled out anew")
    assert is_served(release)
    assert {one["process"] for one in release.pods() if one["part"] == "gateway"}.isdisjoint(
        one["process"] for one in before
    )
