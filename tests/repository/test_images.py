"""The images' lock files, and the commands of Dockerfile and compose.yaml, held against what they are made for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from moiety_platform.cluster.entries import missing_entries
from moiety_platform.settings import GatewaySettings
from moiety_platform.trace_receiver.settings import TraceSettings

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "helm" / "images"
LOCKS = {
    "gateway": ("gateway", "endpoint-picker"),
    "dashboard": ("dashboard",),
    "engine-cuda": ("engine",),
    "engine-cpu": ("engine",),
}
IMAGE_PYTHON = {"python_version": "3.11", "python_full_version": "3.11.14", "sys_platform": "linux"}
PIN = re.compile(r"^([a-z0-9.-]+)==(\S+) \\\n((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def pins(lock: str) -> dict[str, Version]:
    """Every package of a lock file; a line that is neither a pin with hashes nor a comment is an error."""
    text = (IMAGES / f"{lock}.lock").read_text(encoding="utf-8")
    rest = [line for line in PIN.sub("", text).splitlines() if not line.lstrip().startswith("#")]
    assert [line for line in rest if line] == []
    return {name: Version(version) for name, version, _ in PIN.findall(text)}


def asked_for(extras: tuple[str, ...]) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    return [one for one in map(Requirement, texts) if one.marker is None or one.marker.evaluate(IMAGE_PYTHON)]


@pytest.mark.parametrize(("lock", "extras"), LOCKS.items())
def test_a_lock_has_what_its_extra_asks_for(lock: str, extras: tuple[str, ...]) -> None:
    locked = pins(lock)
    wrong = [
        str(one)
        for one in asked_for(extras)
        if (found := locked.get(one.name.lower().replace("_", "-"))) is None or found not in one.specifier
    ]
    assert wrong == [], "run `make locks`"
    assert len(locked) > len(asked_for(extras))


def test_torch_and_numpy_are_not_in_the_gateways_image_and_cuda_only_where_it_is_wanted() -> None:
    assert not pins("gateway").keys() & {"torch", "numpy", "triton", "numba", "streamlit"}
    assert not {name for name in pins("engine-cpu") if name.startswith(("nvidia", "triton"))}
    assert pins("engine-cpu")["torch"].local == "cpu"
    assert pins("engine-cuda").keys() >= {"torch", "triton", "nvidia-cublas"}


def test_both_builds_of_torch_are_the_version_that_the_tests_run_with() -> None:
    pinned = Requirement((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[-1])
    assert all(pins(lock)["torch"] in pinned.specifier for lock in ("engine-cuda", "engine-cpu"))


def compose() -> dict[str, Any]:
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    known: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)
    return known


def commands() -> dict[str, list[str]]:
    """Every command line that the containers run, by where it stands."""
    services = compose()["services"]
    found = {f"compose {name}": service["command"] for name, service in services.items() if "command" in service}
    dockerfile = (IMAGES / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE):
        found[f"image {json.loads(line)[0]}"] = json.loads(line)
    return found


@cache
def help_of(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    called = [sys.executable, "-m", "moiety_platform.cli", *command, "--help"]
    return subprocess.run(called, check=True, capture_output=True, text=True, env=environment, timeout=60).stdout


@pytest.mark.parametrize(("where", "command"), commands().items(), ids=commands())
def test_every_command_of_a_container_is_one_that_there_is(where: str, command: list[str]) -> None:
    words = command[: 2 if command[0] == "migrate" else 1]
    options = {word.partition("=")[0] for word in command if word.startswith("--")}
    known = set(re.findall(r"--[a-z0-9-]+", help_of(*words)))
    assert "--help" in known
    assert options <= known, where


def test_every_environment_variable_of_a_container_is_a_setting() -> None:
    for name in ("gateway", "traces", "migrate"):
        fields = set(GatewaySettings.model_fields) | set(TraceSettings.model_fields)
        given = {key.removeprefix("MOIETY_").lower() for key in compose()["services"][name]["environment"]}
        assert given <= fields, name


def test_containers_are_let_out_to_this_machine_only_and_keep_their_root_file_systems() -> None:
    services = compose()["services"]
    assert {name for name, one in services.items() if "ports" in one} == {"gateway", "dashboard"}
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", ()))
    assert {name for name, one in services.items() if not one.get("read_only")} == {"database"}


def test_images_compose_and_chart_say_one_version_and_one_user() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    dockerfile = (IMAGES / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG VERSION={version}\n" in dockerfile
    ours = {one["image"] for one in compose()["services"].values() if "build" in one}
    assert ours == {f"moiety-{part}:{version}" for part in ("gateway", "dashboard")} | {f"moiety-engine:{version}-cpu"}
    chart = yaml.load((ROOT / "helm" / "moiety" / "Chart.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    assert chart["appVersion"] == version
    pods = (ROOT / "helm" / "moiety" / "templates" / "_pods.tpl").read_text(encoding="utf-8")
    user = re.findall(r"\$user := (\d+)", pods)[0]
    assert re.findall(r"^USER (\d+):\1$", dockerfile, re.MULTILINE)[-1] == user
    assert dockerfile.count('ENTRYPOINT ["moiety"]') == 1
    values = yaml.load((ROOT / "helm" / "moiety" / "values.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    assert compose()["services"]["database"]["image"] == values["database"]["bundled"]["image"]


def test_every_part_of_the_wheel_is_copied_into_the_build_and_let_through_to_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    roots = {package.partition("/")[0] for package in wheel["packages"]}
    dockerfile = (IMAGES / "Dockerfile").read_text(encoding="utf-8")
    assert roots == set(re.findall(r"^COPY (\w+) \1$", dockerfile, re.MULTILINE))
    let_through = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{root}" for root in roots} <= set(let_through)
    assert let_through[1] == "*"


def test_the_install_page_explains_every_example_and_lists_every_entry_of_the_secret() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    examples = [path.name for path in (ROOT / "helm" / "moiety" / "examples").glob("*.yaml")]
    assert [name for name in examples if f"| [{name}](../helm/moiety/examples/{name}) | " not in page] == []
    entries = missing_entries({}, "database")
    assert [name for name in entries if f"`{name}`" not in page] == []
