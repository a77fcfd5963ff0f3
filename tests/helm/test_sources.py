"""The chart's runner gives a container the variables and the user that a cluster would."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from moiety_podrun.errors import Failed, NotPossible
from moiety_podrun.fake_secrets_api import FakeSecretsApi
from moiety_podrun.pod import Pod
from moiety_podrun.sources import Sources


def test_variables_come_from_config_maps_and_secrets_and_those_of_the_container_override_them(tmp_path: Path) -> None:
    with FakeSecretsApi(tmp_path / "account") as api:
        api.store("hidden", "TOKEN", b"t")
        api.store("hidden", "MODE", b"fast")
        sources = Sources(api, tmp_path, {"site": {"data": {"PROXY": "p", "MODE": "slow"}}})
        container: dict[str, Any] = {
            "envFrom": [
                {"configMapRef": {"name": "site"}, "prefix": "SITE_"},
                {"secretRef": {"name": "hidden"}},
                {"configMapRef": {"name": "absent", "optional": True}},
            ],
            "env": [{"name": "MODE", "value": 3}],
        }
        assert sources.variables(container) == {"SITE_PROXY": "p", "SITE_MODE": "slow", "TOKEN": "t", "MODE": "3"}
        with pytest.raises(Failed, match="the Secret absent, which is not there"):
            sources.variables({"envFrom": [{"secretRef": {"name": "absent"}}]})


def test_a_pod_with_sidecars_is_refused() -> None:
    containers = {"initContainers": [{"name": "proxy", "image": "p:1", "restartPolicy": "Always"}]}
    template = {"metadata": {"labels": {}}, "spec": containers}
    nothing = cast("Any", None)
    with pytest.raises(NotPossible, match="the pod gateway has sidecars"):
        Pod("gateway", template, {}, nothing, nothing, Path(), nothing)
