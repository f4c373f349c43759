"""The machine that runs pods: their addresses and names, the Services, and all pods by name."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.pods.container import Image
from tests.pods.environment import PodFacts
from tests.pods.manifests import Manifest, Manifests
from tests.pods.network import PodNetwork
from tests.pods.pod import Pod, PodPlace
from tests.pods.services import NameServer, RunningService

CLUSTER_DOMAIN = "cluster.local"
NODE = "node-0"


@dataclass(slots=True)
class Node:
    """One node with a namespace. ``open`` and everything else on one event loop."""

    objects: Manifests
    folder: Path
    image: Image
    network: PodNetwork = field(default_factory=PodNetwork)
    pods: dict[str, Pod] = field(default_factory=dict)
    """Those that are not gone."""
    former: list[Pod] = field(default_factory=list)
    _services: dict[str, RunningService] = field(default_factory=dict)
    _names: asyncio.DatagramTransport | None = None
    _numbers: Any = field(default_factory=itertools.count)

    async def open(self) -> None:
        """Names and Services are there."""
        loop = asyncio.get_running_loop()
        self._names, _ = await loop.create_datagram_endpoint(
            lambda: NameServer(self.look_up), local_addr=(self.network.node, 53)
        )
        for manifest in self.objects.of_kind("Service"):
            is_headless = manifest["spec"].get("clusterIP") == "None"
            address = "" if is_headless else self.network.add_service()
            service = RunningService(manifest, address, lambda: list(self.pods.values()))
            await service.start()
            self._services[service.name] = service

    async def close(self) -> None:
        """End everything at once."""
        await asyncio.gather(*(pod.kill() for pod in list(self.pods.values())))
        await asyncio.gather(*(service.close() for service in self._services.values()))
        if self._names is not None:
            self._names.close()
        self.network.close()

    def look_up(self, name: str) -> list[str] | None:
        """The addresses of a full name; None: there is no such name."""
        domain = f"{self.objects.namespace}.svc.{CLUSTER_DOMAIN}"
        for service in self._services.values():
            names = service.names(domain)
            if name in names:
                return names[name] or None
        return None

    def service_address(self, name: str) -> str:
        """Of a Service that has one."""
        return self._services[name].address

    def start_pod(
        self,
        name: str,
        template: Manifest,
        *,
        subdomain: str = "",
        labels: Mapping[str, str] | None = None,
    ) -> Pod:
        """Run a pod; ``template`` has its metadata and spec."""
        assert name not in self.pods, f"there is a pod {name}"
        address, held = self.network.add_pod()
        metadata, spec = template.get("metadata") or {}, dict(template["spec"])
        if subdomain:
            spec |= {"hostname": name, "subdomain": subdomain}
        facts = PodFacts(
            name=name,
            namespace=self.objects.namespace,
            uid=str(uuid.uuid4()),
            ip=address,
            host_ip=self.network.node,
            node=NODE,
            service_account=spec.get("serviceAccountName", "default"),
            labels={**(metadata.get("labels") or {}), **(labels or {})},
            annotations=metadata.get("annotations") or {},
        )
        hostname = spec.get("hostname", name)
        place = PodPlace(
            facts=facts,
            held=held,
            folder=self.folder / f"{name}-{next(self._numbers)}",
            etc=self._etc(hostname, address, spec.get("subdomain", "")),
            hostname=hostname,
            image=self.image,
        )
        pod = Pod({"metadata": metadata, "spec": spec}, self.objects, place, self._on_change)
        self.pods[name] = pod
        pod.start()
        return pod

    async def delete_pod(self, name: str) -> Pod:
        """End it in order; returns when it is gone."""
        pod = self.pods[name]
        await pod.terminate()
        self._on_change()
        return pod

    def _on_change(self) -> None:
        for name, pod in list(self.pods.items()):
            if pod.is_gone:
                self.former.append(self.pods.pop(name))

    def _etc(self, hostname: str, address: str, subdomain: str) -> dict[str, str]:
        namespace = f"{self.objects.namespace}.svc.{CLUSTER_DOMAIN}"
        full = f"{hostname}.{subdomain}.{namespace} " if subdomain else ""
        user = "tandem:x:10001:10001::/tmp:/usr/sbin/nologin\n"
        return {
            "hosts": f"127.0.0.1 localhost\n{address} {full}{hostname}\n",
            "hostname": f"{hostname}\n",
            "resolv.conf": (
                f"nameserver {self.network.node}\n"
                f"search {namespace} svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}\noptions ndots:5\n"
            ),
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
            "passwd": "root:x:0:0:root:/root:/bin/sh\n" + user,
            "group": "root:x:0:\ntandem:x:10001:\n",
        }
