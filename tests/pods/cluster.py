"""What a test says to such a cluster: install, wait, scale, run `helm test`.

Deployments, StatefulSets and LeaderWorkerSets as their controllers have them, and Jobs of one pod.
The cluster lives on a thread of its own; a test calls it from any other.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tests.pods.container import Image
from tests.pods.groups import PodGroups, own_service
from tests.pods.manifests import Manifest, Manifests
from tests.pods.node import Node
from tests.pods.pod import Pod

MOST_RESTARTS = 2
"""More of them while a cluster starts are a failure."""
POLL_S = 0.05
_ResultT = TypeVar("_ResultT")


class PodCluster:
    """All of some manifests, running; a context manager."""

    def __init__(self, objects: Manifests, folder: Path) -> None:
        """Start nothing yet."""
        sets = objects.of_kind("LeaderWorkerSet")
        services = [own_service(one) for one in sets]
        self._objects = Manifests.of([*objects.objects, *services], objects.namespace)
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pods", daemon=True)
        self._node: Node | None = None
        self._replicas: dict[str, int] = {}
        self._groups: dict[str, PodGroups] = {}
        self._controllers: list[asyncio.Task[None]] = []
        self._endings: set[asyncio.Task[Pod]] = set()

    def __enter__(self) -> PodCluster:
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything at once."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for task in self._controllers:
            task.cancel()
        outcomes = await asyncio.gather(*self._controllers, return_exceptions=True)
        if self._node is not None:
            await self._node.close()
        await asyncio.gather(*self._endings, return_exceptions=True)
        for outcome in outcomes:
            if not isinstance(outcome, asyncio.CancelledError) and outcome is not None:
                raise outcome

    @property
    def node(self) -> Node:
        """Where everything runs."""
        assert self._node is not None
        return self._node

    def url(self, service: str, scheme: str = "http") -> str:
        """Of a Service that this machine can reach."""
        manifest = self._objects.find("Service", service)
        assert manifest is not None, f"no Service {service}"
        port = manifest["spec"]["ports"][0]["port"]
        return f"{scheme}://{self.node.service_address(service)}:{port}"

    def pods_of(self, owner: str) -> list[Pod]:
        """The pods of a workload that are not gone, in their order."""
        return [
            pod
            for _, pod in sorted(self.node.pods.items())
            if pod.place.facts.labels.get("pods/owner") == owner
        ]

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        """Wait until there are as many pods as wanted, all ready.

        Raises:
            AssertionError: one cannot be run, or ends again and again; says why.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_settled():
            self._check_pods()
            if time.monotonic() > deadline:
                raise AssertionError(f"not ready within {timeout_s:g} s:\n{self.describe()}")
            time.sleep(POLL_S)

    def scale(self, name: str, replicas: int) -> None:
        """As `kubectl scale`: returns at once."""
        self._replicas[name] = replicas

    def run_test(self, release: str = "", timeout_s: float = 240.0) -> tuple[int, str]:
        """As `helm test`, of one of several releases: its pod's exit status, and what it said."""
        (manifest,) = [
            one
            for one in self._objects.of_kind("Pod", hook="test")
            if not release or release == one["metadata"]["labels"]["app.kubernetes.io/instance"]
        ]
        name = manifest["metadata"]["name"]
        pod: Pod = self._call(self._start_pod(name, manifest))
        deadline = time.monotonic() + timeout_s
        while pod.exit_status is None and not pod.error:
            if time.monotonic() > deadline:
                raise AssertionError(f"{name} did not end:\n{pod.log()}")
            time.sleep(POLL_S)
        log = pod.error or pod.log()
        self._call(self.node.delete_pod(name))
        status = pod.exit_status
        return (125 if status is None else status), log

    def delete_pod(self, name: str) -> Pod:
        """As `kubectl delete pod`: returns when it is gone; its controller makes another one."""
        pod: Pod = self._call(self.node.delete_pod(name))
        return pod

    def num_recreated(self, name: str) -> int:
        """How many groups of a LeaderWorkerSet were made anew because a pod of theirs failed."""
        return self._groups[name].num_recreated

    def signal(self, pod: Pod, number: int) -> None:
        """To the first process of each of its containers."""
        for state in pod.states:
            if state.running is not None:
                self._loop.call_soon_threadsafe(state.running.signal, number)

    def events(self) -> list[str]:
        """What happened to pods that should not."""
        pods = [*self.node.former, *self.node.pods.values()]
        return [event for pod in pods for event in pod.events]

    def describe(self) -> str:
        """Everything that may tell why it is not as it should be."""
        lines = []
        for name, pod in sorted(self.node.pods.items()):
            state = "ready" if pod.is_ready else pod.error or "not ready"
            lines += [f"--- {name}: {state}", pod.log(3000)]
        return "\n".join([*self.events(), *lines])

    async def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        image = Image.here(self._folder / "image")
        self._node = Node(self._objects, self._folder / "pods", image)
        await self._node.open()
        for manifest in self._objects.of_kind("Deployment", "StatefulSet"):
            name = manifest["metadata"]["name"]
            self._replicas[name] = int(manifest["spec"].get("replicas", 1))
            work = self._keep_set if manifest["kind"] == "StatefulSet" else self._keep_deployment
            self._controllers.append(asyncio.create_task(work(manifest), name=f"keep {name}"))
        for manifest in self._objects.of_kind("LeaderWorkerSet"):
            self._keep_groups(manifest)
        for manifest in self._objects.of_kind("Job"):
            name = f"{manifest['metadata']['name']}-{secrets.token_hex(3)}"
            self._node.start_pod(name, manifest["spec"]["template"])

    def _keep_groups(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        self._replicas[name] = int(manifest["spec"].get("replicas", 1))
        groups = PodGroups(manifest, self.node, lambda: self._replicas[name])
        self._groups[name] = groups
        self._controllers.append(asyncio.create_task(groups.keep(), name=f"keep {name}"))

    async def _start_pod(self, name: str, template: Manifest, **options: Any) -> Pod:
        return self.node.start_pod(name, template, **options)

    async def _keep_deployment(self, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        while True:
            pods = [pod for pod in self.pods_of(name) if not pod.is_terminating]
            for _ in range(self._replicas[name] - len(pods)):
                self._start_owned(f"{name}-{secrets.token_hex(4)}", name, manifest)
            for pod in pods[self._replicas[name] :]:
                self._end(pod)
            await asyncio.sleep(POLL_S)

    async def _keep_set(self, manifest: Manifest) -> None:
        """One after the other unless its policy is Parallel; the last number goes first."""
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        in_order = spec.get("podManagementPolicy", "OrderedReady") != "Parallel"
        while True:
            wanted = self._replicas[name]
            for number in range(wanted):
                pod = self.node.pods.get(f"{name}-{number}")
                if pod is None:
                    self._start_owned(f"{name}-{number}", name, manifest)
                if in_order and (pod is None or not pod.is_ready):
                    break
            for pod in sorted(self.pods_of(name), key=_ordinal, reverse=True):
                if _ordinal(pod) >= wanted:
                    self._end(pod)
                    if in_order:
                        break
            await asyncio.sleep(POLL_S)

    def _start_owned(self, pod_name: str, owner: str, manifest: Manifest) -> None:
        spec = manifest["spec"]
        labels = {"pods/owner": owner}
        if manifest["kind"] == "StatefulSet":
            labels |= {"statefulset.kubernetes.io/pod-name": pod_name}
            labels |= {"apps.kubernetes.io/pod-index": pod_name.rpartition("-")[2]}
        self.node.start_pod(
            pod_name, spec["template"], subdomain=spec.get("serviceName", ""), labels=labels
        )

    def _end(self, pod: Pod) -> None:
        if not pod.is_terminating:
            task = asyncio.ensure_future(self.node.delete_pod(pod.name))
            self._endings.add(task)
            task.add_done_callback(self._endings.discard)

    def _is_settled(self) -> bool:
        pods = self.node.pods
        owned = {name: self.pods_of(name) for name in self._replicas}
        sizes = {name: groups.size for name, groups in self._groups.items()}
        return all(
            len(owned[name]) == count * sizes.get(name, 1)
            and all(pod.is_ready for pod in owned[name])
            for name, count in self._replicas.items()
        ) and all(not pod.is_terminating for pod in pods.values())

    def _check_pods(self) -> None:
        for pod in list(self.node.pods.values()):
            restarts = sum(state.num_restarts for state in pod.states)
            if pod.error or restarts > MOST_RESTARTS:
                raise AssertionError(f"{pod.name} cannot be run:\n{self.describe()}")
        for name, groups in self._groups.items():
            if groups.num_recreated > MOST_RESTARTS:
                raise AssertionError(f"{name} cannot be run:\n{self.describe()}")

    def _call(self, work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _ordinal(pod: Pod) -> int:
    return int(pod.name.rpartition("-")[2])
