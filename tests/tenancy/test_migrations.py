"""Migrations: they make what the models say, both ways, once, on both databases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import moiety_migrations
import moiety_platform.gateway  # noqa: F401 - all tables, also where this file is run alone
from moiety_migrations import (
    HEAD,
    REVISIONS,
    DatabaseTooNew,
    DatabaseUnreachable,
    MigrationError,
    UnknownRevision,
    concurrent_indexes,
    current,
    downgrade,
    upgrade,
)
from moiety_platform.batches.models import Batch
from moiety_platform.db.url import redact, to_sync_url
from moiety_platform.files.models import StoredFile
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.models import UsageRecord

QUOTAS = {"quotas", "quota_windows", "quota_leases", "quota_rates", "prices", "routes", "guardrails"}
USAGE = {"usage_hours", "ledger", "audit_log", "usage_attributed_sums", "usage_attributed_spans"}
BATCHES = {"files", "file_chunks", "batches", "batch_lines"}
IDEMPOTENCY = {"idempotent_requests", "idempotency_tenants"}
ALERTS = {"quota_thresholds", "quota_alerts", "webhooks", "webhook_deliveries", "tenant_deletions"}
OPERATIONAL_ALERTS = {"operational_alerts", "alert_conditions"}
DECLARED = {"declarations"}
UPKEEP = {"retention_jobs", "usage_cuts", "usage_minutes", "usage_days", "usage_day_marks"}
WAKE = {"wake_demands", "wake_leases", "wake_switches", "wake_times"}
EXPORTS = {"usage_exports", "content_logging", "request_contents"}
TRACES = {"traces", "spans"}
ADAPTERS = {"adapters", "adapter_chunks"}
CONVERSATIONS = {"conversations", "conversation_items", "response_events"}
KEPT = {
    "simulations",
    *CONVERSATIONS,
    *WAKE,
    "object_stores",
    *ADAPTERS,
    *DECLARED,
    *BATCHES,
    *IDEMPOTENCY,
    *ALERTS,
    *OPERATIONAL_ALERTS,
    *UPKEEP,
    *EXPORTS,
    *TRACES,
    "users",
    "key_policies",
    "agent_runs",
    "agent_run_requests",
    "jwt_issuers",
    "jwt_grants",
    "spot_prices",
    "receipt_chains",
    "receipts",
    "receipt_keys",
}
LATER = {"service_classes", "responses", *CONVERSATIONS, *QUOTAS, *USAGE, *KEPT}  # than the first
TABLES = {"tenants", "projects", "api_keys", "usage", *LATER}


def table_names(url: str) -> set[str]:
    engine = sa.create_engine(to_sync_url(url), poolclass=sa.NullPool)
    return set(sa.inspect(engine).get_table_names()) - {"alembic_version"}


def execute(url: str, statement: str) -> None:
    engine = sa.create_engine(to_sync_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(statement))


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moiety_migrations", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def test_an_upgraded_database_is_what_the_models_say(empty_url: str) -> None:
    assert upgrade(empty_url) == HEAD
    assert UsageRecord.metadata is StoredFile.metadata is Batch.metadata is ApiKey.metadata
    engine = sa.create_engine(to_sync_url(empty_url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, ApiKey.metadata) == []
        checks = {check["name"] for check in sa.inspect(connection).get_check_constraints("tenants")}
    assert checks == {"ck_tenants_weight_positive", "ck_tenants_status_known"}


def test_every_revision_goes_up_and_down_and_up_again(empty_url: str) -> None:
    assert current(empty_url) is None
    upgrade(empty_url)
    assert table_names(empty_url) == TABLES
    assert current(empty_url) == HEAD
    downgrade(empty_url, "base")
    assert table_names(empty_url) == set()
    assert current(empty_url) is None
    assert upgrade(empty_url) == HEAD
    assert table_names(empty_url) == TABLES


def test_upgrading_an_upgraded_database_keeps_its_rows(empty_url: str) -> None:
    upgrade(empty_url)
    execute(empty_url, "INSERT INTO tenants VALUES ('t', 'n', 'standard', 1.0, 'active', '2026-01-01', 'free', NULL)")
    assert upgrade(empty_url) == HEAD
    engine = sa.create_engine(to_sync_url(empty_url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM tenants")) == 1


def test_tenants_of_the_first_schema_come_along_with_their_projects_and_go_back_again(empty_url: str) -> None:
    upgrade(empty_url)
    downgrade(empty_url, "0001")
    assert table_names(empty_url) == TABLES - LATER
    moment = "'2026-01-01 00:00:00'"
    execute(empty_url, f"INSERT INTO tenants VALUES ('t', 'n', 'flex', 1.0, 'active', {moment})")
    execute(empty_url, f"INSERT INTO projects VALUES ('p', 't', 'n', {moment})")
    execute(
        empty_url,
        "INSERT INTO usage VALUES ('r', 't', 'p', 'k', '/', 'm', 'flex', "
        f"{moment}, 'stop', 200, 1, 1, 0, 1, 0, 0, 0, NULL)",
    )
    assert upgrade(empty_url) == HEAD
    engine = sa.create_engine(to_sync_url(empty_url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        row = connection.execute(sa.text("SELECT num_preemptions, slo_attained FROM usage")).one()
        joined = "SELECT service_class FROM tenants JOIN projects ON projects.tenant_id = tenants.id"
        assert (tuple(row), connection.scalar(sa.text(joined))) == ((0, None), "flex")
        entry = "SELECT kind, prompt_tokens, output_tokens FROM ledger WHERE request_id = 'r'"
        assert tuple(connection.execute(sa.text(entry)).one()) == ("settled", 1, 1)
        hours = "SELECT requests, prompt_tokens, num_ttft FROM usage_hours WHERE hour = '2026-01-01 00:00:00.000000'"
        assert tuple(connection.execute(sa.text(hours)).one()) == (1, 1, 1)
    with engine.connect() as connection:
        (key,) = sa.inspect(connection).get_foreign_keys("tenants")
        assert (key["constrained_columns"], key["referred_table"]) == (["service_class"], "service_classes")
        (key,) = sa.inspect(connection).get_foreign_keys("projects")
        assert key["referred_table"] == "tenants"
    execute(
        empty_url,
        "INSERT INTO service_classes (name, rank, weight, ttft_s, ttft_per_1k_s, max_queue_s, preemptible, "
        "on_overload, price_factor) VALUES ('gold', 0, 1, 1, 0, 1, true, 'reject', 1)",
    )
    execute(empty_url, "UPDATE tenants SET service_class = 'gold'")
    downgrade(empty_url, "0001")
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT service_class FROM tenants")) == "standard"


def test_administrators_from_before_there_were_roles_become_owners_and_the_log_says_whose_things_were_changed(
    empty_url: str,
) -> None:
    upgrade(empty_url)
    downgrade(empty_url, "0005")
    moment = "'2026-01-01 00:00:00'"
    columns = "INSERT INTO api_keys (id, project_id, name, secret_hash, hint, scopes, created_at)"
    execute(empty_url, f"INSERT INTO tenants VALUES ('t', 'n', 'flex', 1.0, 'active', {moment})")
    execute(empty_url, f"INSERT INTO projects VALUES ('p', 't', 'n', {moment})")
    for key, project in (("admin", "NULL"), ("client", "'p'")):
        execute(empty_url, f"{columns} VALUES ('{key}', {project}, 'n', '', '', '[]', {moment})")
    limits = {"tenant": "t", "project": "p", "key": "client"}
    changed: list[Any] = [
        ("tenants", "t", {}),
        ("projects", "p", {}),
        ("api_keys", "client", {}),
        ("api_keys", "admin", {}),
    ]
    changed += [("quotas", "gone", {"level": level, "scope_id": scope}) for level, scope in limits.items()]
    changed += [("service_classes", "flex", {})]
    for seq, (kind, object_id, row) in enumerate(changed, 1):
        before = json.dumps(row).replace(":", r"\:")
        values = f"({seq}, {moment}, 'admin', 'delete', '{kind}', '{object_id}', '{before}', NULL, '')"
        execute(empty_url, f"INSERT INTO audit_log VALUES {values}")
    upgrade(empty_url)
    columns = f"{columns[:-1]}, role, tenant_id)"
    execute(empty_url, f"{columns} VALUES ('v', NULL, 'n', '', '', '[]', {moment}, 'viewer', 't')")
    wrong = (("owner", "'t'", "NULL"), ("tenant-admin", "NULL", "NULL"), ("viewer", "NULL", "'p'"))
    for role, tenant, project in wrong:
        values = f"('x', {project}, 'n', '', '', '[]', {moment}, '{role}', {tenant})"
        with pytest.raises(sa.exc.IntegrityError):
            execute(empty_url, f"{columns} VALUES {values}")
    engine = sa.create_engine(to_sync_url(empty_url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        keys = connection.execute(sa.text("SELECT id, role, tenant_id FROM api_keys ORDER BY id")).all()
        owners = connection.scalars(sa.text("SELECT tenant_id FROM audit_log ORDER BY seq")).all()
    assert [tuple(key) for key in keys] == [("admin", "owner", None), ("client", None, None), ("v", "viewer", "t")]
    assert owners == ["t", "t", "t", None, "t", "t", "t", None]
    downgrade(empty_url, "0005")
    with engine.connect() as connection:
        revoked = connection.scalars(sa.text("SELECT id FROM api_keys WHERE revoked_at IS NOT NULL")).all()
    assert revoked == ["v"]  # without its role it could do everything


def test_the_slo_outcome_in_usage_and_traces_gets_its_present_names_and_back(empty_url: str) -> None:
    upgrade(empty_url)
    downgrade(empty_url, "0030")
    moment = "'2026-01-01 00:00:00'"
    attributes = r'{"moiety.sla_attained"\: false, "moiety.kept_for"\: "sla_missed", "said"\: "sla_missed"}'
    events = r'[{"name"\: "moiety.demoted", "attributes"\: {"moiety.reason"\:"beyond_repair"}}]'
    execute(
        empty_url,
        "INSERT INTO usage (request_id, tenant_id, project_id, key_id, endpoint, model, service_class, started_at, "
        "outcome, http_status, num_choices, prompt_tokens, cached_tokens, output_tokens, duration_ms, sla_attained) "
        f"VALUES ('r', 't', 'p', 'k', '/', 'm', 'flex', {moment}, 'stop', 200, 1, 1, 0, 1, 0, false)",
    )
    execute(
        empty_url,
        f"INSERT INTO traces VALUES ('t', 's', 'r', 't', 'flex', 'chat', 'm', {moment}, 1, 'stop', 'beyond_repair', "
        "NULL, 'sla_missed', 1)",
    )
    execute(
        empty_url,
        "INSERT INTO spans VALUES ('t', 's', NULL, 'n', 1, 'g', 't', 1, 2, 0, '', "
        f"'{attributes}', '{events}', '[]', 1)",
    )
    stored = [
        f"SELECT {column} FROM {table}"
        for table, columns in {"traces": ("kept_for", "reason"), "spans": ("attributes", "events")}.items()
        for column in columns
    ]
    engine = sa.create_engine(to_sync_url(empty_url), poolclass=sa.NullPool)

    def read() -> list[Any]:
        with engine.connect() as connection:
            return [connection.scalar(sa.text(statement)) for statement in stored]

    former = read()
    upgrade(empty_url)
    kept_for, reason, present_attributes, present_events = read()
    assert (kept_for, reason) == ("slo_missed", "slo_unattainable")
    expected = {"moiety.slo_attained": False, "moiety.kept_for": "slo_missed", "said": "sla_missed"}
    assert _loaded(present_attributes) == expected
    assert _loaded(present_events)[0]["attributes"] == {"moiety.reason": "slo_unattainable"}
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT slo_attained FROM usage")) in (False, 0)
    downgrade(empty_url, "0030")
    assert read() == former


def _loaded(value: Any) -> Any:
    """Return a JSON column's value; PostgreSQL's driver has parsed it, SQLite's has not."""
    return json.loads(value) if isinstance(value, str) else value


def test_processes_that_upgrade_at_the_same_time_all_succeed(empty_url: str) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "moiety_migrations", "upgrade", "--json", "--database-url", empty_url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(3)
    ]
    outputs = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], outputs
    assert {json.loads(output)["revision"] for output, _ in outputs} == {HEAD}
    assert table_names(empty_url) == TABLES


def test_a_migration_that_fails_leaves_nothing_behind(empty_url: str) -> None:
    execute(empty_url, "CREATE TABLE api_keys (in_the_way integer)")  # the third table of the first revision
    with pytest.raises(MigrationError, match=r"nothing was changed.*already exists"):
        upgrade(empty_url)
    assert table_names(empty_url) == {"api_keys"}
    assert current(empty_url) is None


def test_a_database_of_a_newer_release_is_refused(empty_url: str) -> None:
    upgrade(empty_url)
    execute(empty_url, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(DatabaseTooNew, match=f"9999, which this release \\(at {HEAD}\\) does not know.*newer release"):
        upgrade(empty_url)
    with pytest.raises(DatabaseTooNew):
        downgrade(empty_url, "base")
    assert table_names(empty_url) == TABLES


def test_going_back_to_a_revision_that_does_not_exist_is_refused(empty_url: str) -> None:
    upgrade(empty_url)
    with pytest.raises(UnknownRevision, match="base, 0001"):
        downgrade(empty_url, "nonsense")


def test_the_written_list_of_revisions_is_that_of_the_files() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(moiety_migrations.__file__).parent))
    config.set_main_option("path_separator", "os")
    scripts = ScriptDirectory.from_config(config)
    assert [script.revision for script in scripts.walk_revisions()][::-1] == list(REVISIONS)
    assert scripts.get_current_head() == HEAD


def test_a_start_with_nothing_to_do_loads_neither_alembic_nor_sqlalchemy(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'moiety.db'}"
    upgrade(url)
    script = (
        "import sys; from moiety_migrations import upgrade; upgrade(sys.argv[1]);"
        "print(sorted({'alembic', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, url],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.strip() == "[]"


def test_the_command_tells_where_a_database_is_and_by_its_exit_code(empty_url: str) -> None:
    before = run_command("current", "--json", MOIETY_DATABASE_URL=empty_url)
    assert (before.returncode, json.loads(before.stdout)) == (
        1,
        {"database": redact(empty_url), "revision": None, "head": HEAD},
    )
    assert run_command("upgrade", "--database-url", empty_url).returncode == 0
    after = run_command("current", "--json", MOIETY_DATABASE_URL=empty_url)
    assert (after.returncode, json.loads(after.stdout)) == (
        0,
        {"database": redact(empty_url), "revision": HEAD, "head": HEAD},
    )


@pytest.mark.parametrize(
    ("url", "exit_code", "said"),
    [
        ("mysql://root@localhost/x", 2, "not a supported database URL"),
        ("sqlite:///:memory:", 2, "must name a plain file"),
        ("postgresql://u:hunter2@127.0.0.1:1/x", 3, "cannot reach the database at postgresql://u:***@127.0.0.1:1/x"),
    ],
)
def test_a_database_that_cannot_be_used_is_said_plainly_without_its_password(
    url: str, exit_code: int, said: str
) -> None:
    done = run_command("upgrade", "--database-url", url)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_database_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, but long enough to look into" * 100)
    with pytest.raises(DatabaseUnreachable, match="check that it is a SQLite file of ours"):
        upgrade(f"sqlite:///{tmp_path / 'notes.txt'}")


def test_a_folder_that_cannot_be_made_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatabaseUnreachable, match="cannot make the folder"):
        upgrade(f"sqlite:///{tmp_path / 'file' / 'deeper' / 'moiety.db'}")


def test_a_second_migration_waits_while_the_first_holds_the_lock(
    new_postgres: Callable[[str], str],
) -> None:
    url = new_postgres("locked")
    with psycopg.connect(url) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(%s)", (0x6D6F_6965_7479,))
        waiter = subprocess.Popen(
            [sys.executable, "-m", "moiety_migrations", "upgrade", "--database-url", url],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with psycopg.connect(url, autocommit=True) as watcher:
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while watcher.execute(waiting).fetchone() == (0,):
                assert waiter.poll() is None, "it did not wait"
        assert table_names(url) == set()
    assert waiter.wait(timeout=120) == 0
    assert table_names(url) == TABLES


def test_the_command_takes_the_data_directory_of_the_gateway_and_says_which_database_it_means(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    done = run_command("upgrade", MOIETY_DATABASE_URL="", MOIETY_DATA_DIR=str(tmp_path / "data"))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "data" / "moiety.db") in done.stdout
    assert (tmp_path / "data" / "moiety.db").exists()


def index_state(url: str) -> list[tuple[str, bool]]:
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT relname, indisvalid FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid WHERE relname = %s",
            ("ix_usage_end_user",),
        )
        return [(str(name), bool(is_valid)) for name, is_valid in found]


def test_an_index_of_a_large_table_is_built_after_the_transaction_of_the_revisions(
    new_postgres: Callable[[str], str],
) -> None:
    url = new_postgres("concurrent_index")
    upgrade(url)
    downgrade(url, "0025")
    assert index_state(url) == []
    with psycopg.connect(url) as builder:  # another process that builds
        builder.execute("SELECT pg_advisory_xact_lock(%s)", (concurrent_indexes._LOCK,))
        assert upgrade(url) == HEAD == current(url)
        assert index_state(url) == []
    assert upgrade(url) == HEAD
    assert index_state(url) == [("ix_usage_end_user", True)]


def test_an_index_whose_build_was_interrupted_is_built_again_by_the_next_upgrade(
    new_postgres: Callable[[str], str],
) -> None:
    url = new_postgres("interrupted_index")
    upgrade(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_usage_end_user'::regclass")
        assert index_state(url) == [("ix_usage_end_user", False)]
        holder = psycopg.connect(url)
        holder.execute("SELECT pg_advisory_xact_lock(%s)", (concurrent_indexes._LOCK,))
        assert upgrade(url) == HEAD
        assert index_state(url) == [("ix_usage_end_user", False)]  # another process builds it
        holder.rollback()  # a close alone does not wait until the server has released the lock
        holder.close()
    assert upgrade(url) == HEAD
    assert index_state(url) == [("ix_usage_end_user", True)]
