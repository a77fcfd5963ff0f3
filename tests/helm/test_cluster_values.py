"""Values that fit the chart to a cluster are rendered, valid for Kubernetes 1.34, and refused where they are wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

from moiety_platform.cli.config import problems_of

from .conftest import CHART, Objects, Render, Values, pod_templates
from .test_validations import REFUSED

if TYPE_CHECKING:
    import helm_python

CASES = yaml.load(Path(__file__).with_name("cluster_cases.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
CUSTOM = ("leaderworkerset.x-k8s.io/v1", "keda.sh/v1alpha1")  # see test_custom_objects.py
NUM_CASES = 40


def refusal(chart: helm_python.Chart, values: Values) -> str:
    """Return the message with which the chart refuses the values."""
    import helm_python  # not before the fork of workers: it starts threads

    with pytest.raises(helm_python.HelmError) as refused:
        chart.render(values, name="rel", namespace="prod")
    return str(refused.value)


def find(objects: Objects, place: str) -> Any:
    """Return the object `Kind/name`, the specification of its pods, or the settings that a ConfigMap contains."""
    is_declared, place = place.startswith("declared "), place.removeprefix("declared ")
    kind, _, name = place.removeprefix("pod ").partition("/")
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, f"rel-moiety{name}"))
    if is_declared:
        return yaml.load(found["data"]["declared.yaml"], yaml.CSafeLoader)
    if kind == "ConfigMap":
        return yaml.load(found["data"]["moiety.yaml"], yaml.CSafeLoader)["gateway"]
    return pod_templates(found)[0]["spec"] if place.startswith("pod ") else found


def missing(wanted: Any, found: Any, path: str) -> list[str]:
    """Return what of `wanted` is not in `found`, each with its path."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return [f"{path}: {found!r} is no map"]
        return [one for key, value in wanted.items() for one in missing(value, found.get(key), f"{path}.{key}")]
    if isinstance(wanted, list):
        rendered = found if isinstance(found, list) else []
        absent = [one for one in wanted if not any(missing(one, other, "") == [] for other in rendered)]
        return [f"{path}: no element has {one!r}" for one in absent]
    return [] if wanted == found else [f"{path}: {found!r}, and not {wanted!r}"]


@pytest.fixture(scope="module")
def releases(render: Render) -> list[Objects]:
    """The objects of each group of cases, rendered once."""
    return [render(group["values"]) for group in CASES["rendered"]]


def test_each_value_is_rendered_where_it_belongs(releases: list[Objects]) -> None:
    failures = [
        f"{case}: {one}"
        for group, objects in zip(CASES["rendered"], releases, strict=True)
        for case, places in group["cases"].items()
        for place, wanted in places.items()
        for one in missing(wanted, find(objects, place), place)
    ]
    assert not failures, "\n".join(failures)


def test_what_is_rendered_is_valid_in_kubernetes_1_34(releases: list[Objects]) -> None:
    made = {json.dumps(one, sort_keys=True): one for objects in releases for one in objects}
    known = [one for one in made.values() if one["apiVersion"] not in CUSTOM]
    assert len(known) > 80
    for one in known:
        kubernetes_validate.validate(one, "1.34", strict=True)


@pytest.fixture(scope="module")
def messages(chart: helm_python.Chart) -> list[str]:
    """The message of each refused case, in their order."""
    return [refusal(chart, values) for values, *_ in CASES["refused"]]


def test_a_wrong_value_is_refused_with_its_name_and_what_to_do(messages: list[str]) -> None:
    failures = [
        f"{values}: {word!r} is not in {message}"
        for (values, *words), message in zip(CASES["refused"], messages, strict=True)
        for word in words
        if word not in message
    ]
    assert not failures, "\n".join(failures)
    assert sum(len(group["cases"]) for group in CASES["rendered"]) + len(messages) >= NUM_CASES


def test_every_refusal_of_the_templates_is_tried(messages: list[str], chart: helm_python.Chart) -> None:
    tried = messages + [refusal(chart, values) for values, _ in REFUSED]
    templates = [path.read_text(encoding="utf-8") for path in (CHART / "templates" / "validations").iterdir()]
    sentences = [one for text in templates for one in re.findall(r'fail (?:\(printf )?"((?:[^"\\]|\\.)*)"', text)]
    assert len(sentences) == sum(text.count("{{- fail") for text in templates)
    patterns = [re.sub(r"%[sdvq]", ".*", re.escape(one.replace('\\"', '"'))) for one in sentences]
    assert [one for one in patterns if not any(re.search(one, message) for message in tried)] == []


def test_the_job_before_an_upgrade_finds_nothing_wrong(
    releases: list[Objects], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOIETY_TRACES_TOKEN", "0123456789abcdef")
    file = tmp_path / "moiety.yaml"
    for objects in releases:
        (checked,) = (one for one in objects if one["metadata"]["name"] == "rel-moiety-check" and "data" in one)
        file.write_text(checked["data"]["moiety.yaml"], encoding="utf-8")
        assert {*yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)} == {"gateway", "traces"}
        assert list(problems_of(file)) == []


def test_without_a_fixed_user_every_pod_fits_the_restricted_scc_of_openshift(releases: list[Objects]) -> None:
    """Its rules: no user and group of the pod's own, no privileges, and volumes of a few kinds."""
    (objects,) = (
        found
        for group, found in zip(CASES["rendered"], releases, strict=True)
        if group["values"].get("podDefaults") == {"fixedUser": False}
    )
    pods = [template["spec"] for one in objects for template in pod_templates(one)]
    assert len(pods) > 6
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for pod in pods:
        assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & pod["securityContext"].keys()
        assert {kind for volume in pod.get("volumes", ()) for kind in volume if kind != "name"} <= allowed
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            rights = container["securityContext"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["allowPrivilegeEscalation"] is False
            assert not {"runAsUser", "privileged"} & rights.keys()
            if "moiety-" in container["image"]:  # the images' own directory belongs to their user
                assert container["workingDir"] in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize(
    ("ingress", "address", "admin"),
    [
        ({"enabled": False}, "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ({"hosts": ["a.example.com"], "tlsSecret": "t"}, "https://a.example.com", "http://127.0.0.1:8000"),
        ({"host": "b.example.com", "paths": ["/v1", "/admin"]}, "http://b.example.com", "http://b.example.com"),
    ],
)
def test_the_notes_make_a_tenant_and_a_key_and_send_a_request(
    ingress: Values, address: str, admin: str, chart: helm_python.Chart
) -> None:
    made = chart.render({"ingress": {"enabled": True, **ingress}}, name="rel", namespace="prod")
    (notes,) = (text for name, text in made.items() if name.endswith("NOTES.txt"))
    steps = (
        f"export MOIETY_URL={admin}\n",
        "moiety tenant create acme\n",
        "moiety key create website --tenant acme\n",
        f"curl {address}/v1/chat/completions --oauth2-bearer",
    )
    places = [notes.index(step) for step in steps]
    assert places == sorted(places)
    assert '{"model":"moiety-demo",' in notes
    assert ("port-forward svc/rel-moiety 8000:80" in notes) == (admin == "http://127.0.0.1:8000")
    assert not any(word.endswith(":") for word in notes.split())
