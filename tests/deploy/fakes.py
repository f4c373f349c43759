"""Clusters of fake roles for the tests: a configuration, entry points, a launcher without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.checks.cluster import resolve_config
from deploy.errors import ClusterError
from deploy.hosts.places import Places
from deploy.plan import InstancePlan, ProcessSpec, Role, RunContext
from deploy.running.child import Child, ChildReport, LogPiece, read_log
from deploy.running.launcher import Room, Running, SupervisorLostError, Waiting, places_here
from deploy.state import RunDir
from runtime.config import ClusterConfig, ClusterSection, ModelSection, RouterSection
from runtime.config.file import dump_config
from runtime.net.credentials import Credentials
from runtime.net.roles import Role as Callee

ROOT = Path(__file__).resolve().parents[2]
MODEL_FIELDS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
"""A config.json that the checks accept; heads split by 4, experts by 8."""


def fake_entrypoints() -> dict[Role, tuple[str, ...]]:
    module = "tests.deploy.fake_role"
    return {role: (sys.executable, "-m", module, role.value) for role in Role}


def fake_config(
    folder: Path, *, prefill_tp: int = 1, decode_dp: int = 1, routers: int = 1
) -> ClusterConfig:
    """A resolved configuration with free ports; its run directory is in ``folder``."""
    base = ClusterConfig(
        cluster=ClusterSection(name="fake", run_dir=str(folder)),
        model=ModelSection(path=str(write_model(folder)), name="fake-model"),
        router=RouterSection(port=0, control_port=0, instances=routers),
    )
    return resolve_config(
        dataclasses.replace(
            base,
            prefill=dataclasses.replace(base.prefill, tp=prefill_tp),
            decode=dataclasses.replace(base.decode, dp=decode_dp),
        )
    )


TOKENIZER = {
    "decoder": {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
    },
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}  # fmt: skip
"""The least that is one."""


def draft_weights(fields: Mapping[str, Any]) -> bytes:
    """A file of safetensors with the names of what the layers for drafts have, and no numbers.

    A config.json that does not name them has one, as for transformers.
    """
    first, number = fields["num_hidden_layers"], fields.get("num_nextn_predict_layers", 1)
    own = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    names = [f"model.layers.{first + i}.{name}" for i in range(number) for name in own]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(names, empty)).encode()
    return len(header).to_bytes(8, "little") + header


def write_model(folder: Path, **changes: object) -> Path:
    """A checkpoint without numbers, whose config.json has ``MODEL_FIELDS`` and ``changes``."""
    path = folder / "model"
    path.mkdir(exist_ok=True)
    fields = {**MODEL_FIELDS, **changes}
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER), encoding="utf-8")
    (path / "model.safetensors").write_bytes(draft_weights(fields))
    return path


def fake_context(config: ClusterConfig, folder: Path) -> RunContext:
    run_dir = RunDir(folder / config.cluster.name)
    run_dir.create()
    run_dir.config_path.write_text(dump_config(config), encoding="utf-8")
    return RunContext(
        run_id=f"test-{os.getpid()}-{folder.name}",
        config=config,
        config_path=run_dir.config_path,
        log_dir=run_dir.log_dir,
        credentials=Credentials(secret="a secret of tests", role=Callee.CONTROLLER),
        entrypoints=fake_entrypoints(),
    )


class LocalSupervisor:
    """A ``Supervisor`` in this process."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._child = Child(spec)
        self.is_lost = False

    async def poll(self) -> ChildReport:
        if self.is_lost:
            raise SupervisorLostError("its host has not answered for 10 s")
        return self._child.poll()

    async def read_log(self, offset: int, limit: int) -> LogPiece:
        return read_log(Path(self._child.spec.log_path), offset, limit)

    async def terminate(self) -> None:
        self._child.terminate()

    async def kill(self) -> None:
        self._child.kill()


class LocalPlacement:
    """A ``Placement`` on this machine, with processes started from this one."""

    def __init__(self, plan: InstancePlan, places: Places, launcher: LocalLauncher) -> None:
        self.places = places
        self._plan = plan
        self._launcher = launcher

    async def start(self, specs: tuple[ProcessSpec, ...]) -> tuple[LocalSupervisor, ...]:
        supervisors = tuple(LocalSupervisor(spec) for spec in specs)
        started = zip(specs, self.places.ranks, supervisors, strict=True)
        self._launcher.running[self._plan.name] = tuple(
            Running(spec=spec, place=place, supervisor=supervisor)
            for spec, place, supervisor in started
        )
        return supervisors


class LocalLauncher:
    """A ``Launcher`` without Ray; it has room while ``has_room`` is set."""

    def __init__(self, room: int = 100) -> None:
        self.launched: list[str] = []
        self.released: list[str] = []
        self.room = room
        """Instances that can be added."""
        self._placed: set[str] = set()
        self.running: dict[str, tuple[Running, ...]] = {}
        self.has_room = asyncio.Event()
        self.has_room.set()

    async def place(self, plan: InstancePlan, wait: Waiting) -> LocalPlacement:
        while not self.has_room.is_set():
            wait.tell("waits, no room: it asks for a host with 1 CPU")
            await asyncio.wait({asyncio.ensure_future(self.has_room.wait())}, timeout=0.05)
            if not wait.is_patient and not self.has_room.is_set():
                raise ClusterError(f"{plan.name}: no room")
        self.launched.append(plan.name)
        self.room -= plan.name not in self._placed
        self._placed.add(plan.name)
        return LocalPlacement(plan, places_here(plan, "127.0.0.1"), self)

    async def release(self, plan: InstancePlan) -> None:
        self.released.append(plan.name)
        self.room += plan.name in self._placed
        self._placed.discard(plan.name)

    async def room_for(self, plan: InstancePlan) -> Room:
        return Room(num_instances=self.room, why=f"{self.room} places are free")

    async def adopt(self, plan: InstancePlan) -> tuple[Running, ...]:
        return self.running.get(plan.name, ())

    def lose(self, instance: str) -> None:
        """As where the host of all its ranks is gone."""
        for one in self.running[instance]:
            assert isinstance(one.supervisor, LocalSupervisor)
            one.supervisor.is_lost = True
