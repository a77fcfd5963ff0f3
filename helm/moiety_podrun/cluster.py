"""A running release: installed, upgraded and restarted as Helm and Kubernetes' controllers do it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moiety_podrun.fake_secrets_api import FakeSecretsApi
from moiety_podrun.network import Network
from moiety_podrun.pod import Pod
from moiety_podrun.rendering import Object, Release
from moiety_podrun.services import Services
from moiety_podrun.sources import Sources

START_S = 180.0  # time limit for a pod to become ready
SCALE_POLL_S = 0.2


class Cluster:
    """Owner of all running pods; it lists them in the folder's pods.json.

    `namespace` is the one that the release was rendered for.
    """

    def __init__(self, folder: Path, namespace: str, policies: list[Object], api: FakeSecretsApi) -> None:
        self._network = Network([one["spec"] for one in policies])
        self._names, self._folder, self._api = folder / "names", folder, api
        self._sets: dict[tuple[str, str], list[Pod]] = {}
        self._serial = 0
        self._stateful: dict[str, Object] = {}  # StatefulSets of the release
        self.services = Services(self._network, self._names, namespace, self.pods)

    def pods(self) -> Iterator[Pod]:
        """Return all pods that are meant to keep running."""
        return (pod for pods in self._sets.values() for pod in pods)

    async def bring_in(self, release: Release, api: FakeSecretsApi) -> None:
        """Install or upgrade as `helm install` or `helm upgrade --wait` does. Raises Failed with a pod's log."""
        config_maps = {one["metadata"]["name"]: one for one in release.of_kind("ConfigMap")}
        self._sources = Sources(api, self._folder, config_maps)
        for hook in release.before:
            await self._run_hook(hook)
        for service in release.of_kind("Service"):
            await self.services.add(service)
        workloads = [one for one in release.objects if one["kind"] in ("Deployment", "StatefulSet")]
        groups = [one for one in release.objects if one["kind"] == "LeaderWorkerSet"]
        self._stateful = {one["metadata"]["name"]: one for one in workloads if one["kind"] == "StatefulSet"}
        for name, workload in self._stateful.items():
            api.scales.setdefault(name, _replicas(workload))
        await asyncio.gather(*map(self._roll_out, workloads), *map(self._roll_out_groups, groups))
        for hook in release.after:
            await self._run_hook(hook)
        self._changed()

    async def keep_database(self, workload: Object, api: FakeSecretsApi, secret: str) -> None:
        """Run a PostgreSQL outside the release, as an operator has one, with its address in the Secret's entry `url`.

        Raises Failed.
        """
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        (wanted,) = (one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one)
        password = secrets.token_hex(16)
        api.store(wanted["name"], wanted["key"], password.encode())
        self._sources = Sources(api, self._folder, {})
        await self._roll_out(workload)
        (pod,) = self._sets[workload["kind"], workload["metadata"]["name"]]
        port = pod.peer.ports["postgres"]
        api.store(secret, "url", f"postgresql://moiety:{password}@{pod.peer.address}:{port}/moiety".encode())

    async def follow_scales(self, api: FakeSecretsApi) -> None:
        """Start and stop pods of StatefulSets as their scale in the API asks, until cancelled."""
        while True:
            for name, workload in self._stateful.items():
                pods = self._sets.get(("StatefulSet", name), [])
                while len(pods) < api.scales[name]:
                    pods.append(self._start(workload, len(pods)))
                while len(pods) > api.scales[name]:
                    await pods[-1].stop()
                    del pods[-1]
                    self._changed()
            await asyncio.sleep(SCALE_POLL_S)

    async def close(self) -> None:
        """Stop everything, in order."""
        await self.services.close()
        await asyncio.gather(*(pod.stop() for pod in self.pods()))
        self._sets.clear()

    async def _run_hook(self, hook: Object) -> None:
        if hook["kind"] == "Job":
            pod = self._new_pod(hook["metadata"]["name"], hook["spec"]["template"], {})
            async with asyncio.timeout(hook["spec"]["activeDeadlineSeconds"]):
                await pod.run_to_end()

    async def _roll_out(self, workload: Object) -> None:
        """Replace all pods of a workload.

        Each pod of a Deployment stops after its successor is ready; those of a StatefulSet stop before, the last first.
        """
        name, spec = workload["metadata"]["name"], workload["spec"]
        pods = self._sets.setdefault((workload["kind"], name), [])
        if not pods:
            pods += [self._start(workload, number) for number in range(_replicas(workload))]
            await asyncio.gather(*(pod.until_ready(START_S) for pod in list(pods)))
        elif workload["kind"] == "Deployment":
            for old in list(pods):
                new = self._start(workload, 0)
                pods.append(new)
                await new.until_ready(START_S)
                await asyncio.sleep(spec.get("minReadySeconds", 0))
                pods.remove(old)
                await old.stop()
        else:
            for number in reversed(range(len(pods))):
                await pods[number].stop()
                pods[number] = self._start(workload, number)
                await pods[number].until_ready(START_S)
                await asyncio.sleep(spec.get("minReadySeconds", 0))

    async def _roll_out_groups(self, workload: Object) -> None:
        """Replace a LeaderWorkerSet's groups in sequence: all pods of one stop, then all start."""
        name, spec = workload["metadata"]["name"], workload["spec"]
        for number in range(spec["replicas"]):
            pods = self._sets.setdefault((workload["kind"], f"{name}-{number}"), [])
            await asyncio.gather(*(pod.stop() for pod in pods))
            pods[:] = self._start_group(name, number, spec["leaderWorkerTemplate"])
            await pods[0].until_ready(START_S)

    def _start_group(self, name: str, number: int, terms: Object) -> list[Pod]:
        leader = f"{name}-{number}"
        pods = []
        for index in range(terms["size"]):
            variables = {
                "LWS_LEADER_ADDRESS": leader,
                "LWS_GROUP_SIZE": str(terms["size"]),
                "LWS_WORKER_INDEX": str(index),
            }
            template = terms["workerTemplate" if index else "leaderTemplate"]
            called = f"{leader}-{index}" if index else leader
            pods.append(self._new_pod(called, template, {}, unique=False, variables=variables))
        self.services.name_pod(leader, pods[0].peer.address)
        for pod in pods:
            pod.start()
        return pods

    def _start(self, workload: Object, number: int) -> Pod:
        name, spec = workload["metadata"]["name"], workload["spec"]
        of_a_set = workload["kind"] == "StatefulSet"
        claims = {
            claim["metadata"]["name"]: self._sources.claim(f"{claim['metadata']['name']}-{name}-{number}")
            for claim in spec.get("volumeClaimTemplates", ())
        }
        pod = self._new_pod(f"{name}-{number}" if of_a_set else name, spec["template"], claims, unique=not of_a_set)
        pod.start()
        return pod

    def _new_pod(
        self,
        name: str,
        template: Object,
        claims: Mapping[str, Path],
        *,
        unique: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> Pod:
        if unique:
            self._serial += 1
            name = f"{name}-{self._serial:x}"
        return Pod(name, template, claims, self._network, self._sources, self._names, self._changed, variables)

    def _changed(self) -> None:
        self.services.tell_names()
        told = [
            {"pod": pod.name, "part": pod.part, "address": pod.peer.address, "process": pod.process}
            for pod in self.pods()
        ]
        self._api.pods = [_document(pod) for pod in self.pods()]
        (self._folder / "pods.json").write_text(json.dumps(told, indent=2), encoding="utf-8")


def _document(pod: Pod) -> Object:
    """Return what the Kubernetes API tells of a running pod."""
    status = {"phase": "Running", "podIP": pod.peer.address}
    return {
        "apiVersion": "v1", "kind": "Pod", "status": status,
        "metadata": {"name": pod.name, "labels": dict(pod.labels), "resourceVersion": "1"},
    }  # fmt: skip


def _replicas(workload: Object) -> int:
    """Return the number of pods at the first start; Kubernetes' default is one."""
    return int(workload["spec"].get("replicas", 1))


def values_of(overrides: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Merge several sets of values, the later ones taking precedence; tables are merged, lists are not, as in Helm."""
    merged: dict[str, Any] = dict(overrides)
    for other in others:
        for key, value in other.items():
            mine = merged.get(key)
            merged[key] = values_of(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged
