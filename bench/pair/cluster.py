"""Router, prefill ranks and decode ranks of one host as children of this process; no Ray.

The same commands as under ``tandem up``. Nothing is started again: the first process that ends
ends the measurement. Ranks on GPUs see all of them, each instance in an order of its own, so that
every rank's own one comes at its number: libraries that want to see their peers' GPUs do.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.engine.report import say
from deploy.checks.cluster import check_config, resolve_config
from deploy.devices import NO_MULTICAST, count_devices, rotate, visible_devices
from deploy.errors import ClusterError, ProcessDiedError
from deploy.plan import (
    InstancePlan,
    Role,
    RunContext,
    default_entrypoints,
    plan_instances,
    process_specs,
)
from deploy.running.child import Child, ChildReport
from deploy.running.instance import Death
from deploy.running.launcher import places_here
from deploy.running.sweep import clean_up
from deploy.views.log_lines import last_stage
from runtime.config import ClusterConfig
from runtime.config.file import dump_config
from runtime.net.credentials import Credentials

_POLL_S = 0.1
_SHOW_S = 10.0
_STOP_S = 15.0
_IDLE_S = 60.0


class PairCluster:
    """A running cluster; use it as a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        *,
        start_timeout_s: float,
        environments: Mapping[Role, Mapping[str, str]] | None = None,
    ) -> None:
        """Check, and start nothing yet.

        Args:
            config: of the cluster.
            folder: where its configuration and logs go.
            start_timeout_s: for all processes to be ready.
            environments: further variables of the processes of a role.

        Raises:
            ConfigError: a value that cannot work on this machine.
        """
        self.config = resolve_config(config)
        check_config(self.config, num_devices=count_devices())
        self._start_timeout_s = start_timeout_s
        self._environments = environments or {}
        self._context = RunContext(
            run_id=secrets.token_hex(8),
            config=self.config,
            config_path=folder / "cluster.toml",
            log_dir=folder,
            credentials=Credentials.of_secret(secrets.token_hex(32)),
            entrypoints=default_entrypoints(),
        )
        self._children: list[Child] = []
        self._stages: dict[str, str] = {}

    def __enter__(self) -> PairCluster:
        self._context.config_path.write_text(dump_config(self.config), encoding="utf-8")
        try:
            self._start()
            self._wait(self._is_ready, self._start_timeout_s, "the cluster to be ready")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def check(self) -> None:
        """Look after the processes.

        Raises:
            ProcessDiedError: one has ended; with the end of its log.
        """
        for child in self._children:
            report = child.poll()
            self._stages[child.spec.name] = _stage_of(report, self._stages.get(child.spec.name, ""))
            if report.exit_status is not None:
                death = Death(
                    process=child.spec.name,
                    exit_status=report.exit_status,
                    log_path=child.spec.log_path,
                    last_lines=report.last_lines,
                )
                raise ProcessDiedError(f"{death}:\n{death.log_tail(30)}")

    def wait_idle(self) -> None:
        """Wait until no request is anywhere and every pool has all its blocks back.

        Raises:
            ClusterError: it does not come to that.
        """
        self._wait(lambda: not self.busy(), _IDLE_S, "every pool to be empty", self.busy)

    def busy(self) -> list[str]:
        """What is not back to zero, one line each; empty when nothing is left."""
        status = self._status()
        if status is None:
            return ["the router does not answer"]
        counts = {"router": {"in flight": status["num_requests_in_flight"]}}
        for worker in status["workers"]:
            load = worker["load"]
            counts[f"{worker['instance']}/{worker['rank']}"] = {
                "running": load["num_requests_running"],
                "waiting": load["num_requests_waiting"],
                "quarantined": load["num_quarantined_blocks"],
                "held": load["num_total_blocks"] - load["num_free_blocks"],
            }
        return [f"{name} {held}" for name, held in counts.items() if any(held.values())]

    def metrics_addresses(self) -> list[str]:
        """Where the workers export their metrics."""
        status = self._status()
        return [] if status is None else [item["metrics_address"] for item in status["workers"]]

    def router_cpu_s(self) -> float:
        """CPU seconds of the router and its HTTP processes."""
        router = psutil.Process(self._children[0].pid)
        times = [process.cpu_times() for process in (router, *router.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def _start(self) -> None:
        host, first_device = self.config.cluster.host, 0
        for plan in plan_instances(self.config):
            specs = process_specs(plan, self._context, places_here(plan, host))
            added = {**self._environments.get(plan.role, {}), **_devices(plan, first_device)}
            for spec in specs:
                child = Child(dataclasses.replace(spec, env={**spec.env, **added}))
                self._children.append(child)
            first_device += plan.num_ranks if plan.device == "cuda" else 0

    def _is_ready(self) -> bool:
        status = self._status()
        expected = sum(len(plan.registering_ranks) for plan in plan_instances(self.config))
        return status is not None and len(status["workers"]) == expected

    def _wait(
        self,
        condition: Callable[[], bool],
        timeout_s: float,
        what: str,
        left: Callable[[], Sequence[str]] = list,
    ) -> None:
        began = shown = time.monotonic()
        while not condition():
            self.check()
            now = time.monotonic()
            if now - began > timeout_s:
                lines = [f"    {name}: {stage}" for name, stage in self._stages.items()]
                told = "\n".join([*(f"    {line}" for line in left()), *lines])
                raise ClusterError(f"waited {timeout_s:g} s for {what} in vain:\n{told}")
            if now - shown > _SHOW_S:
                shown = now
                stages = "; ".join(f"{name}: {stage}" for name, stage in self._stages.items())
                say(f"{now - began:.0f} s: {stages}")
            time.sleep(_POLL_S)

    def _status(self) -> Mapping[str, Any] | None:
        """The router's ``/status``; None while it does not answer."""
        cluster, router = self.config.cluster, self.config.router
        connection = http.client.HTTPConnection(cluster.host, router.port, timeout=5.0)
        try:
            connection.request("GET", "/status")
            answer: Mapping[str, Any] = json.loads(connection.getresponse().read())
            return answer
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _end(self) -> None:
        """Ask the workers to end, before the router, then kill what is left."""
        deadline = time.monotonic() + _STOP_S
        for child in reversed(self._children):
            child.terminate()
        while time.monotonic() < deadline:
            if all(child.poll().exit_status is not None for child in self._children):
                break
            time.sleep(_POLL_S)
        for child in self._children:
            child.kill()
        clean_up(self._context.run_id)


def _devices(plan: InstancePlan, first_device: int) -> dict[str, str]:
    """Variables of the ranks of ``plan``, of which rank r is on device ``first_device + r``."""
    if plan.device != "cuda":
        return {}
    order = rotate(visible_devices(os.environ, count_devices()), first_device)
    return {**NO_MULTICAST, "CUDA_VISIBLE_DEVICES": ",".join(order)}


def _stage_of(report: ChildReport, before: str) -> str:
    return last_stage(report.lines) or before
