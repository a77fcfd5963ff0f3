"""A full disk and used-up open files: at /readyz, in the log and as metrics."""

from __future__ import annotations

import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from litestar import Litestar
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from moiety_platform.controllers import with_services
from moiety_platform.db.failures import unavailable_if_unreachable
from moiety_platform.errors import Unavailable
from moiety_platform.health import ProbeController, Probes
from moiety_platform.machine_limits import MachineCollector, MachineLimits, are_files_used_up
from moiety_platform.supervisor_status import HANG, SupervisorStatus

EVERYTHING = 1 << 62  # no disk has so much space


async def test_a_full_disk_is_a_warning_with_its_remedy_and_is_logged_once(tmp_path: Path) -> None:
    machine = MachineLimits(tmp_path, min_free_bytes=EVERYTHING)
    with capture_logs() as logs:
        await machine.check()
        await machine.check()
    ((event, reason),) = [(one["event"], one["reason"]) for one in logs]
    assert event == "disk_full"
    assert f"the disk of {tmp_path} is full" in reason and "free some space" in reason
    assert machine.warnings() == [reason]


async def test_a_disk_with_space_gives_no_warning(tmp_path: Path) -> None:
    assert MachineLimits(tmp_path, min_free_bytes=0).warnings() == []


@pytest.mark.parametrize(("with_reasons", "reasons"), [(True, []), (True, ["no engine"]), (False, [])])
async def test_readyz_names_a_full_disk_only_to_operators_and_stays_as_ready_as_it_is(
    tmp_path: Path, with_reasons: bool, reasons: list[str]
) -> None:
    machine = MachineLimits(tmp_path, min_free_bytes=EVERYTHING)
    replicas: Any = SimpleNamespace(why_not_ready=lambda: reasons)
    probes = Probes(replicas, None, None, with_reasons=with_reasons, machine=machine)
    app: Any = Litestar([with_services(ProbeController, probes=probes)], openapi_config=None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.get("/readyz")
    assert answer.status_code == (503 if reasons else 200)
    assert answer.json().get("reasons", []) == reasons
    warnings = answer.json().get("warnings", [])
    assert [told.partition(" is full")[0] for told in warnings] == [f"the disk of {tmp_path}"] * with_reasons


def test_free_space_and_the_counts_of_the_supervisor_are_metrics(tmp_path: Path) -> None:
    status = SupervisorStatus(tmp_path / "status")
    status.count_restart("engine", HANG)
    status.count_lost("gateway", 7)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in MachineCollector(tmp_path, tmp_path / "status").collect()
        for sample in metric.samples
    }
    assert samples["moiety_data_dir_free_bytes",] > 0
    assert samples["moiety_open_files_used_up",] == 0
    assert samples["moiety_serve_restarts_total", "engine", "hang"] == 1
    assert samples["moiety_serve_lost_output_bytes_total", "gateway"] == 7


def test_used_up_files_are_found_at_the_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not are_files_used_up()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert are_files_used_up()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_full_database_is_not_called_unreachable(tmp_path: Path) -> None:
    """SQLite's own limit of pages gives the error of a full disk."""
    with closing(sqlite3.connect(tmp_path / "full.db")) as connection:
        connection.execute("CREATE TABLE one (content BLOB)")
        connection.execute("PRAGMA max_page_count = 3")
        with pytest.raises(sqlite3.OperationalError) as full:
            connection.execute("INSERT INTO one VALUES (zeroblob(100000))")
    with pytest.raises(Unavailable, match="disk of the database is full"), unavailable_if_unreachable():
        raise OperationalError("INSERT", {}, full.value)
