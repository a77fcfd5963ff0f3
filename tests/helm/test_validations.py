"""Values that cannot work are refused, each with the sentence that says what to set."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import helm_python

MINE = {"existingSecret": "pg", "bundled": {"enabled": False}}
VLLM = {"name": "v", "kind": "vllm"}


def pool(**values: Any) -> dict[str, Any]:
    return {"engines": [{"name": "a", **values}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"database": {"existingSecret": "pg"}}, "set database.bundled.enabled=false to use the database of the Secret"),
    ({"database": {"bundled": {"enabled": False}}}, "set database.existingSecret to a Secret whose entry `url`"),
    ({"secrets": {"existingSecret": "mine"}}, "leave secrets.existingSecret empty, or set database.bundled.enabled=f"),
    ({"engines": []}, "set engines to a list with at least one pool"),
    ({"engines": [{"name": "a"}, {"name": "a"}]}, "two pools of engines are named a: give each its own name"),
    ({"httpRoute": {"enabled": True}}, "needs a Gateway to attach to"),
    ({"inferencePool": {"enabled": True}}, "set httpRoute.enabled=true and httpRoute.parentRefs"),
    ({"inferencePool": {"enabled": True}, "httpRoute": {"enabled": True}}, "set httpRoute.parentRefs"),
    (
        {
            "inferencePool": {"enabled": True, "picker": {"tls": False, "tlsSecret": "t"}},
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "p"}]},
        },
        "set tls=true, or leave tlsSecret empty",
    ),
    ({"ingress": {"enabled": True}}, "set ingress.host, such as llm.example.com"),
    (
        {"objectStore": {"url": "s3://b", "volume": {"existingClaim": "c"}}},
        "are both set: files and adapters are stored either in a bucket or on a volume",
    ),
    ({"objectStore": {"volume": {"accessMode": "ReadWriteOnce"}}}, "set objectStore.url to a bucket, such as s3://"),
    ({"gateway": {"settings": {"key_pepper": "x"}}}, "set MOIETY_KEY_PEPPER from that Secret in gateway.extraEnv"),
    ({"gateway": {"settings": {"drain_s": 3}}}, "gateway.settings.drain_s is set by the chart itself"),
    (pool(model={"hub": "a/b", "claim": "c"}), "set one of model.hub, model.claim and model.image"),
    (pool(model={"path": "x"}), "set model.claim or model.image"),
    (pool(model={"hubTokenSecret": "t"}), "set model.hub, or leave model.hubTokenSecret empty"),
    ({"engines": [{**VLLM, "model": {"hub": "a/b"}}]}, "set model.name to the name that clients use"),
    ({"engines": [{**VLLM, "model": {"name": "a", "tokenizerClaim": "t"}}]}, "set model.hub, model.claim or model.i"),
    (pool(autoscaling={"enabled": True}), "set model.name to the `model` label of the pool"),
    (pool(model={"name": "a"}, autoscaling={"enabled": True, "minReplicas": 9}), "raise autoscaling.maxReplicas"),
    (pool(role="prefill"), "add a pool with role=decode and the same model.name"),
    (pool(role="decode", nodes=2, options={"tp": 2}), "set role=both, or kind=moiety and nodes=1"),
    (pool(nodes=2, gpus=8, options={"tp": 8, "ffn-ranks": 4}), "pool a has 16 ranks"),
    (pool(nodes=2, options={"tp": 2}, stateSize="1Gi"), "or set nodes=1"),
    (pool(options={"listen": "x"}), "pool a sets the option listen, which the chart sets itself"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_a_value_that_cannot_work_is_refused(values: dict[str, Any], sentence: str, chart: helm_python.Chart) -> None:
    import helm_python  # not before the fork of workers: it starts threads

    with pytest.raises(helm_python.HelmRenderError, match=re.escape(sentence)):
        chart.render(values, name="rel", namespace="prod")
