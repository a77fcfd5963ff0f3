"""Kubernetes accepts what the chart renders, for every set of values."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from moiety_podrun.errors import NotPossible
from moiety_podrun.rendering import render as podrun_render

from .conftest import pod_templates

if TYPE_CHECKING:
    import helm_python

CUSTOM_GROUPS = (
    "gateway.networking.k8s.io/",
    "inference.networking.k8s.io/",
    "monitoring.coreos.com/",
    "keda.sh/",
    "leaderworkerset.",
)
OWN_NAMES = ("rel-moiety", "tokens")  # of objects of the release; others are the operator's
CHART = Path(__file__).parents[2] / "helm" / "moiety"


def test_the_chart_lints_without_a_complaint() -> None:
    import helm_python  # not before the fork of workers: it starts threads

    report = helm_python.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize(
    "version", [*(pytest.param(version, marks=pytest.mark.thorough) for version in ("1.31", "1.32", "1.33")), "1.34"]
)
def test_every_object_is_valid_in_every_version_of_kubernetes(version: str, all_objects: list[dict[str, Any]]) -> None:
    assert len(all_objects) > 100
    for one in all_objects:
        if not one["apiVersion"].startswith(
            (
                "gateway.networking.k8s.io/",
                "inference.networking.k8s.io/",
                "monitoring.coreos.com/",
                "keda.sh/",
                "leaderworkerset.",
            )
        ):
            kubernetes_validate.validate(one, version, strict=True)  # the others: see test_custom_objects.py


def test_no_name_is_longer_than_kubernetes_takes_for_what_it_makes_of_it(all_objects: list[dict[str, Any]]) -> None:
    assert max(len(one["metadata"]["name"]) for one in all_objects) <= 52


def test_no_two_objects_have_one_name(objects: list[dict[str, Any]]) -> None:
    names = Counter((one["kind"], one["metadata"]["name"]) for one in objects)
    assert [name for name, times in names.items() if times > 1] == []


def test_every_service_finds_pods_and_their_ports(objects: list[dict[str, Any]]) -> None:
    pods = [template for one in objects if one["kind"] != "Job" for template in pod_templates(one)]
    services = [one for one in objects if one["kind"] == "Service"]
    assert services
    for service in services:
        wanted = service["spec"]["selector"].items()
        found = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        assert len(found) == 1, service["metadata"]["name"]
        ports = {port["name"] for one in found[0]["spec"]["containers"] for port in one.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_every_mount_has_its_volume_and_every_name_that_is_used_is_there(objects: list[dict[str, Any]]) -> None:
    by_kind = {kind: {one["metadata"]["name"] for one in objects if one["kind"] == kind} for kind in _kinds(objects)}
    for one, pod in _pods(objects):
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in pod.get("volumes", ())} | claims
        mounts = [mount["name"] for container in _containers(pod) for mount in container.get("volumeMounts", ())]
        assert set(mounts) == volumes, one["metadata"]["name"]
        if account := pod.get("serviceAccountName"):
            assert account in by_kind["ServiceAccount"]
        for volume in pod.get("volumes", ()):
            name = volume.get("configMap", {}).get("name", "")
            assert not name.startswith(OWN_NAMES) or name in by_kind["ConfigMap"]


def test_a_changed_setting_starts_the_gateways_anew(chart: helm_python.Chart) -> None:
    def annotations(values: dict[str, Any]) -> str:
        text = chart.render(values, name="rel", namespace="prod")["moiety/templates/gateway/deployment.yaml"]
        found: dict[str, str] = yaml.load(text, yaml.CSafeLoader)["spec"]["template"]["metadata"]["annotations"]
        return found["checksum/settings"]

    assert annotations({}) == annotations({"gateway": {"replicas": 5}})
    assert annotations({}) != annotations({"gateway": {"settings": {"max_choices": 4}}})


def test_the_readme_is_made_of_the_values() -> None:
    script = runpy.run_path(str(CHART.parent / "write_readme.py"))
    assert (CHART / "README.md").read_text(encoding="utf-8") == script["readme"](), "run: python helm/write_readme.py"


def test_the_schema_has_the_options_of_the_engine() -> None:
    script = runpy.run_path(str(CHART.parent / "write_schema.py"))
    written = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert written == script["written"](script["schema"]()), "run: python helm/write_schema.py"


VLLM = {"name": "v", "kind": "vllm", "model": {"name": "a", "hub": "a/b", "tokenizerClaim": "t"}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max-runing": 4}, "max-runing"),
        ({"max-running": 0}, "max-running"),
        ({"overlap": False}, "overlap"),
        ({"kv-memory-bytes": "much"}, "kv-memory-bytes"),
        ({"prefix-caching": "no"}, "prefix-caching"),
    ],
)
def test_an_engine_option_that_the_engine_would_refuse_is_refused(
    options: dict[str, Any], words: str, chart: helm_python.Chart
) -> None:
    import helm_python  # not before the fork of workers: it starts threads

    for values in (
        {"engines": [{"name": "a", "options": options}]},
        {"engines": [{"name": "a"}], "enginePoolDefaults": {"options": options}},
        {"engines": [{"name": "a", "kind": "moiety", "options": options}], "enginePoolDefaults": {"kind": "vllm"}},
    ):
        with pytest.raises(helm_python.HelmValuesError, match=words):
            chart.render(values, name="rel", namespace="prod")


def test_a_large_number_is_written_as_the_engine_reads_it(chart: helm_python.Chart) -> None:
    options = {"disk-cache-bytes": 200_000_000_000, "join-timeout-s": 1.5}
    made = str(chart.render({"engines": [{"name": "a", "options": options}]}, name="rel", namespace="prod"))
    assert "--disk-cache-bytes=200000000000" in made
    assert "--join-timeout-s=1.5" in made


def test_options_of_vllm_are_not_checked_as_the_engines(chart: helm_python.Chart) -> None:
    options = {"max-model-len": 16384, "overlap": False}
    kind = {key: value for key, value in VLLM.items() if key != "kind"}
    for values in (
        {"engines": [{**VLLM, "options": options}]},
        {"engines": [{**kind, "options": options}], "enginePoolDefaults": {"kind": "vllm"}},
    ):
        assert "--max-model-len=16384" in str(chart.render(values, name="rel", namespace="prod"))


@pytest.mark.parametrize(
    "values", [{"gatewy": {}}, {"gateway": {"replica": 2}}, {"engines": [{"name": "a", "gpu": 1}]}]
)
def test_a_value_that_the_chart_does_not_know_is_refused(values: dict[str, Any], chart: helm_python.Chart) -> None:
    import helm_python  # not before the fork of workers: it starts threads

    with pytest.raises(helm_python.HelmValuesError, match="additional properties"):
        chart.render(values, name="rel", namespace="prod")


def _kinds(objects: list[dict[str, Any]]) -> set[str]:
    return {one["kind"] for one in objects}


def _pods(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(one, template["spec"]) for one in objects for template in pod_templates(one)]


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["containers"], *pod.get("initContainers", ())]


def test_the_runner_says_what_to_install_where_helm_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helm_python", None)
    with pytest.raises(NotPossible, match=r"make \.venv/\.dev"):
        podrun_render({}, "rel", "prod")


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_without_tokens_per_second_a_pool_scales_by_queue_and_slo_and_the_notes_warn(
    chart: helm_python.Chart, kind: str
) -> None:
    def rendered(**scaling: Any) -> tuple[int, str]:
        """How many figures count, and the notes."""
        follows = {"enabled": True, "kind": kind, **scaling}
        pool = {"name": "a", "model": {"name": "ab", "hub": "a/b"}, "autoscaling": follows}
        made = chart.render({"engines": [pool]}, name="rel")
        (scaler,) = (text for name, text in made.items() if name.endswith("engines/autoscaling.yaml"))
        (notes,) = (text for name, text in made.items() if name.endswith("NOTES.txt"))
        return len(yaml.load(scaler, yaml.CSafeLoader)["spec"]["triggers" if kind == "keda" else "metrics"]), notes

    num_figures, notes = rendered()
    assert num_figures == 2
    assert "The pool a is scaled by queue time and SLO miss ratio only" in notes
    num_figures, notes = rendered(tokensPerSecond=900)
    assert num_figures == 3
    assert "is scaled by" not in notes
