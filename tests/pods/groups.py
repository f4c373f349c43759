"""LeaderWorkerSets as their controller has them: groups of pods that live and die together.

Names, labels, annotations and variables of the pods are those of the controller (LeaderWorkerSet
API, v1): the leader of group G is SET-G, the others are SET-G-1 and on. With the restart policy
RecreateGroupOnPodRestart a container that is started again, or a pod that goes, takes all pods of
its group along, and then the group is made anew.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.pods.manifests import Manifest, ManifestError
from tests.pods.node import Node
from tests.pods.pod import Pod

PREFIX = "leaderworkerset.sigs.k8s.io"
POLL_S = 0.05


def own_service(manifest: Manifest) -> dict[str, Any]:
    """The headless Service by which the pods of a set have names, from their first moment on.

    Raises:
        ManifestError: a subdomain for each group, which is not known here.
    """
    name, policy = manifest["metadata"]["name"], _subdomain_policy(manifest)
    if policy != "Shared":
        raise ManifestError(f"LeaderWorkerSet {name}: subdomainPolicy {policy} is not known here")
    selector = {f"{PREFIX}/name": name}
    return {
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }


def _subdomain_policy(manifest: Manifest) -> str:
    return str((manifest["spec"].get("networkConfig") or {}).get("subdomainPolicy", "Shared"))


@dataclass(slots=True)
class PodGroups:
    """All groups of one set; on the event loop of the node."""

    manifest: Manifest
    node: Node
    wanted: Callable[[], int]
    """How many groups there are to be."""
    num_recreated: int = 0
    """Groups that were made anew because one of their pods failed."""
    _endings: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the set."""
        return str(self.manifest["metadata"]["name"])

    @property
    def size(self) -> int:
        """Pods of one group."""
        return int(self.manifest["spec"]["leaderWorkerTemplate"]["size"])

    async def keep(self) -> None:
        """Have as many groups as wanted, for ever."""
        try:
            while True:
                self._reap()
                known = {int(pod.place.facts.labels[f"{PREFIX}/group-index"]) for pod in self.pods}
                for group in sorted(known | set(range(self.wanted()))):
                    if group not in self._endings:
                        self._look_after(group)
                await asyncio.sleep(POLL_S)
        finally:
            for ending in self._endings.values():
                ending.cancel()
            await asyncio.gather(*self._endings.values(), return_exceptions=True)

    @property
    def pods(self) -> list[Pod]:
        """Those that are not gone."""
        key = f"{PREFIX}/name"
        found = self.node.pods.values()
        return [pod for pod in found if pod.place.facts.labels.get(key) == self.name]

    def _reap(self) -> None:
        for group in [group for group, ending in self._endings.items() if ending.done()]:
            self._endings.pop(group).result()

    def _look_after(self, group: int) -> None:
        pods = [self.node.pods[name] for name in self._names(group) if name in self.node.pods]
        if group >= self.wanted():
            self._endings[group] = asyncio.create_task(self._end(pods))
        elif not pods:
            for index in range(self.size):
                self._start(group, index)
        elif self._must_go(pods):
            self.num_recreated += 1
            self._endings[group] = asyncio.create_task(self._end(pods))

    def _must_go(self, pods: list[Pod]) -> bool:
        policy = self.manifest["spec"]["leaderWorkerTemplate"].get("restartPolicy")
        if policy == "None":
            raise ManifestError("restartPolicy None: not known here")
        is_lost = len(pods) < self.size or any(pod.is_terminating for pod in pods)
        return is_lost or any(state.num_restarts for pod in pods for state in pod.states)

    async def _end(self, pods: list[Pod]) -> None:
        """All at once, in order: the leader's deletion takes the others along."""
        for pod in pods:
            if not pod.is_terminating:
                pod.events.append(f"{pod.name}: goes with its group")
        await asyncio.gather(*(self.node.delete_pod(pod.name) for pod in pods))
        while any(pod.name in self.node.pods for pod in pods):  # somebody else deletes one
            await asyncio.sleep(POLL_S)

    def _names(self, group: int) -> list[str]:
        leader = f"{self.name}-{group}"
        return [leader, *(f"{leader}-{index}" for index in range(1, self.size))]

    def _start(self, group: int, index: int) -> None:
        template = copy.deepcopy(dict(self._template(index)))
        address = f"{self.name}-{group}.{self.name}.{self.node.objects.namespace}"
        variables = {
            "LWS_LEADER_ADDRESS": address,
            "LWS_GROUP_SIZE": str(self.size),
            "LWS_WORKER_INDEX": str(index),
        }
        own = [{"name": name, "value": value} for name, value in variables.items()]
        spec = template["spec"]
        for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
            given = [one for one in container.get("env") or () if one["name"] not in variables]
            container["env"] = [*own, *given]
        annotations = {f"{PREFIX}/size": str(self.size)}
        if index:
            annotations[f"{PREFIX}/leader-name"] = f"{self.name}-{group}"
        metadata = template.setdefault("metadata", {})
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **annotations}
        labels = {
            "pods/owner": self.name,
            f"{PREFIX}/name": self.name,
            f"{PREFIX}/group-index": str(group),
            f"{PREFIX}/worker-index": str(index),
        }
        name = self._names(group)[index]
        self.node.start_pod(name, template, subdomain=self.name, labels=labels)

    def _template(self, index: int) -> Manifest:
        templates = self.manifest["spec"]["leaderWorkerTemplate"]
        of_leader: Manifest | None = templates.get("leaderTemplate")
        of_worker: Manifest = templates["workerTemplate"]
        return of_worker if index or of_leader is None else of_leader
