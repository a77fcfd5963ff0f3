"""The objects that Kubernetes itself does not know have the fields of their published references: Gateway API v1, its
Inference Extension v1, the Prometheus operator's monitoring.coreos.com/v1, KEDA's v1alpha1, LeaderWorkerSet v1. Here
stand those fields that the chart uses."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import kubernetes_validate
from pydantic import BaseModel, ConfigDict, Field

from moiety_platform.cli.endpoint_picker import labels_of

from .conftest import Render, pod_templates, value_sets


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=63)
    labels: dict[str, str]
    annotations: dict[str, str] = Field(default_factory=dict)


Spec = TypeVar("Spec", bound=Strict)


class CustomObject(Strict, Generic[Spec]):
    metadata: Metadata
    spec: Spec


class ParentRef(Strict):
    name: str
    namespace: str | None = None
    section_name: str | None = Field(default=None, alias="sectionName")


class PathMatch(Strict):
    type: Literal["Exact", "PathPrefix", "RegularExpression"]
    value: str = Field(pattern="^/")


class RouteMatch(Strict):
    path: PathMatch


class Timeouts(Strict):
    request: str = Field(pattern=r"^([0-9]{1,5}(h|m|s|ms)){1,4}$")


class ServiceRef(Strict):
    name: str
    port: int = Field(ge=1, le=65535)


class PoolRef(Strict):
    """A reference to an InferencePool, which has the port itself."""

    group: Literal["inference.networking.k8s.io"]
    kind: Literal["InferencePool"]
    name: str


class RouteRule(Strict):
    matches: list[RouteMatch] = Field(min_length=1)
    timeouts: Timeouts
    backend_refs: list[ServiceRef | PoolRef] = Field(alias="backendRefs")


class RouteSpec(Strict):
    parent_refs: list[ParentRef] = Field(alias="parentRefs", min_length=1)
    hostnames: list[str] = Field(default_factory=list)
    rules: list[RouteRule]


class HttpRoute(CustomObject[RouteSpec]):
    api_version: Literal["gateway.networking.k8s.io/v1"] = Field(alias="apiVersion")
    kind: Literal["HTTPRoute"]


class LabelSelector(Strict):
    match_labels: dict[str, str] = Field(alias="matchLabels")


class PortNumber(Strict):
    number: int = Field(ge=1, le=65535)


class PickerRef(Strict):
    """A reference to a Service, for which a port is required."""

    name: str
    port: PortNumber
    failure_mode: Literal["FailOpen", "FailClose"] = Field(alias="failureMode")


class PoolSpec(Strict):
    selector: LabelSelector
    target_ports: list[PortNumber] = Field(alias="targetPorts", min_length=1, max_length=8)
    endpoint_picker_ref: PickerRef = Field(alias="endpointPickerRef")


class InferencePool(CustomObject[PoolSpec]):
    api_version: Literal["inference.networking.k8s.io/v1"] = Field(alias="apiVersion")
    kind: Literal["InferencePool"]


class Endpoint(Strict):
    port: str
    path: str
    interval: str = Field(pattern=r"^([0-9]+(ms|s|m|h))+$")


class MonitorSpec(Strict):
    selector: LabelSelector
    endpoints: list[Endpoint]


class ServiceMonitor(CustomObject[MonitorSpec]):
    api_version: Literal["monitoring.coreos.com/v1"] = Field(alias="apiVersion")
    kind: Literal["ServiceMonitor"]


class PodMonitorSpec(Strict):
    selector: LabelSelector
    pod_metrics_endpoints: list[Endpoint] = Field(alias="podMetricsEndpoints")


class PodMonitor(CustomObject[PodMonitorSpec]):
    api_version: Literal["monitoring.coreos.com/v1"] = Field(alias="apiVersion")
    kind: Literal["PodMonitor"]


class Rule(Strict):
    expr: str
    record: str | None = None
    alert: str | None = None
    lasting: str | None = Field(default=None, alias="for")
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class RuleGroup(Strict):
    name: str
    interval: str | None = None
    rules: list[Rule] = Field(min_length=1)


class RuleSpec(Strict):
    groups: list[RuleGroup] = Field(min_length=1)


class PrometheusRule(CustomObject[RuleSpec]):
    api_version: Literal["monitoring.coreos.com/v1"] = Field(alias="apiVersion")
    kind: Literal["PrometheusRule"]


class ScaleTarget(Strict):
    api_version: Literal["apps/v1", "leaderworkerset.x-k8s.io/v1"] = Field(alias="apiVersion")
    kind: Literal["StatefulSet", "Deployment", "LeaderWorkerSet"]
    name: str


class QueryTerms(Strict):
    """KEDA takes all of a trigger's terms as text."""

    server_address: str = Field(alias="serverAddress", pattern="^https?://")
    query: str
    threshold: str = Field(pattern=r"^[0-9.]+$")
    ignore_null_values: Literal["true", "false"] = Field(alias="ignoreNullValues")


class Trigger(Strict):
    type: Literal["prometheus"]
    name: str
    metric_type: Literal["Value", "AverageValue"] = Field(alias="metricType")
    metadata: QueryTerms


class ScaledSpec(Strict):
    scale_target_ref: ScaleTarget = Field(alias="scaleTargetRef")
    min_replica_count: int = Field(alias="minReplicaCount", ge=0)
    max_replica_count: int = Field(alias="maxReplicaCount", ge=1)
    polling_interval: int = Field(alias="pollingInterval", ge=1)
    cooldown_period: int | None = Field(default=None, alias="cooldownPeriod", ge=0)
    advanced: dict[Literal["horizontalPodAutoscalerConfig"], dict[Literal["behavior"], dict[str, Any]]]
    triggers: list[Trigger] = Field(min_length=1)


class ScaledObject(CustomObject[ScaledSpec]):
    api_version: Literal["keda.sh/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["ScaledObject"]


class RollingUpdate(Strict):
    max_unavailable: int = Field(alias="maxUnavailable")
    max_surge: int = Field(alias="maxSurge")


class Rollout(Strict):
    type: Literal["RollingUpdate"]
    rolling_update_configuration: RollingUpdate = Field(alias="rollingUpdateConfiguration")


class LeaderWorkerTemplate(Strict):
    size: int = Field(ge=2)
    restart_policy: Literal["RecreateGroupOnPodRestart", "None"] = Field(alias="restartPolicy")
    leader_template: dict[str, Any] = Field(alias="leaderTemplate")
    worker_template: dict[str, Any] = Field(alias="workerTemplate")


class GroupSpec(Strict):
    replicas: int | None = None
    startup_policy: Literal["LeaderCreated", "LeaderReady"] = Field(alias="startupPolicy")
    rollout_strategy: Rollout = Field(alias="rolloutStrategy")
    leader_worker_template: LeaderWorkerTemplate = Field(alias="leaderWorkerTemplate")


class LeaderWorkerSet(CustomObject[GroupSpec]):
    api_version: Literal["leaderworkerset.x-k8s.io/v1"] = Field(alias="apiVersion")
    kind: Literal["LeaderWorkerSet"]


KINDS: dict[str, type[Strict]] = {
    "HTTPRoute": HttpRoute,
    "InferencePool": InferencePool,
    "LeaderWorkerSet": LeaderWorkerSet,
    "PodMonitor": PodMonitor,
    "PrometheusRule": PrometheusRule,
    "ScaledObject": ScaledObject,
    "ServiceMonitor": ServiceMonitor,
}


def test_every_object_has_the_fields_of_its_reference(all_objects: list[dict[str, Any]]) -> None:
    for one in all_objects:
        if "." in one["apiVersion"] and not one["apiVersion"].partition("/")[0].endswith(".k8s.io"):
            assert one["kind"] in KINDS, "write down the fields of its reference above"
        if one["kind"] in KINDS:
            KINDS[one["kind"]].model_validate(one)


def test_the_pods_of_groups_are_pods_of_kubernetes(all_objects: list[dict[str, Any]]) -> None:
    groups = [one for one in all_objects if one["kind"] == "LeaderWorkerSet"]
    assert groups
    for template in (template for one in groups for template in pod_templates(one)):
        metadata = {"name": "pod", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)


def test_a_pool_selects_the_gateways_and_its_picker_watches_the_same_pods(render: Render) -> None:
    objects = render(value_sets()["a pool of gateways"])
    (pool,) = (one for one in objects if one["kind"] == "InferencePool")
    wanted = pool["spec"]["selector"]["matchLabels"]
    templates = [template for one in objects for template in pod_templates(one)]
    (chosen,) = (one for one in templates if wanted.items() <= one["metadata"]["labels"].items())
    (container,) = chosen["spec"]["containers"]
    assert container["name"] == "gateway"
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    (service,) = (
        one
        for one in objects
        if (one["kind"], one["metadata"]["name"]) == ("Service", pool["spec"]["endpointPickerRef"]["name"])
    )
    assert [one["port"] for one in service["spec"]["ports"]] == [pool["spec"]["endpointPickerRef"]["port"]["number"]]
    picker = next(one for one in templates if service["spec"]["selector"].items() <= one["metadata"]["labels"].items())
    options = dict(one.partition("=")[::2] for one in picker["spec"]["containers"][0]["args"])
    assert labels_of(options["--selector"]) == wanted
    assert (options["--target-port"], options["--operations-port"]) == (str(ports["http"]), str(ports["operations"]))
    (route,) = (one for one in objects if one["kind"] == "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])


def test_a_monitor_reads_the_port_of_the_pickers_metrics_and_only_scrapers_reach_it(render: Render) -> None:
    objects = render(value_sets()["a pool of gateways with monitors"])
    name = "rel-moiety-endpoint-picker"
    named = {one["kind"]: one for one in objects if one["metadata"]["name"] == name}
    (template,) = pod_templates(named["Deployment"])
    monitored = named["PodMonitor"]["spec"]
    assert monitored["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    (endpoint,) = monitored["podMetricsEndpoints"]
    assert (endpoint["path"], f"--metrics-port={ports[endpoint['port']]}" in container["args"]) == ("/metrics", True)
    rules = {rule["ports"][0]["port"]: rule for rule in named["NetworkPolicy"]["spec"]["ingress"]}
    assert set(rules) == {"grpc", endpoint["port"]}
    (scrapers,) = rules[endpoint["port"]]["from"]
    assert list(scrapers) == ["namespaceSelector"], "pods of the release's own namespace do not reach it"
