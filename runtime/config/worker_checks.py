"""What both roles check in the same way."""

from __future__ import annotations

from typing import Protocol

from runtime.config.checks import at_least, one_of
from runtime.config.sizes import check_size
from runtime.errors import ConfigError


class WorkerSection(Protocol):
    """The fields that both roles have."""

    @property
    def instances(self) -> int:
        """As both sections say."""
        ...

    @property
    def device(self) -> str:
        """As both sections say."""
        ...

    @property
    def num_threads(self) -> int:
        """As both sections say."""
        ...

    @property
    def max_num_seqs(self) -> int | str:
        """As both sections say."""
        ...

    @property
    def num_blocks(self) -> int | str:
        """As both sections say."""
        ...

    @property
    def gpu_memory_fraction(self) -> float:
        """As both sections say."""
        ...

    @property
    def block_size(self) -> int:
        """As both sections say."""
        ...

    @property
    def kv_dtype(self) -> str:
        """As both sections say."""
        ...

    @property
    def overlap_steps(self) -> str:
        """As both sections say."""
        ...

    @property
    def step_timeout_s(self) -> float:
        """As both sections say."""
        ...


def check_worker(role: str, section: WorkerSection) -> None:
    """Raise ConfigError for a field of a worker's section that cannot be."""
    at_least(f"{role}.instances", section.instances, 1)
    one_of(f"{role}.device", section.device, ("cpu", "cuda"))
    at_least(f"{role}.num_threads", section.num_threads, 1)
    check_size(f"{role}.max_num_seqs", section.max_num_seqs, 1)
    _check_memory(role, section)
    at_least(f"{role}.step_timeout_s", section.step_timeout_s, 0.0)
    at_least(f"{role}.block_size", section.block_size, 1)
    one_of(f"{role}.kv_dtype", section.kv_dtype, ("auto", "float32", "bfloat16", "fp8"))
    one_of(f"{role}.overlap_steps", section.overlap_steps, ("auto", "on", "off"))


class RebalancedSection(Protocol):
    """The fields that say whether experts move."""

    @property
    def rebalance_experts(self) -> str:
        """As both sections say."""
        ...

    @property
    def rebalance_interval_steps(self) -> int:
        """As both sections say."""
        ...

    @property
    def rebalance_objective(self) -> str:
        """As both sections say."""
        ...

    @property
    def rebalance_min_gain(self) -> float:
        """As both sections say."""
        ...

    @property
    def rebalance_host_gib(self) -> float:
        """As both sections say."""
        ...


def check_rebalance(role: str, section: RebalancedSection) -> None:
    """Raise ConfigError for a field of what moves experts that cannot be."""
    one_of(f"{role}.rebalance_experts", section.rebalance_experts, ("on", "off"))
    one_of(f"{role}.rebalance_objective", section.rebalance_objective, ("time", "rows"))
    at_least(f"{role}.rebalance_interval_steps", section.rebalance_interval_steps, 1)
    at_least(f"{role}.rebalance_min_gain", section.rebalance_min_gain, 0.0)
    path, gib = f"{role}.rebalance_host_gib", section.rebalance_host_gib
    at_least(path, gib, 0.0)
    if gib and section.rebalance_experts == "off":
        problem = f'copies of experts that {role}.rebalance_experts = "off" never moves'
        raise ConfigError(path, gib, problem, f'0, or {role}.rebalance_experts = "on"')


def _check_memory(role: str, section: WorkerSection) -> None:
    path, fraction = f"{role}.gpu_memory_fraction", section.gpu_memory_fraction
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(path, fraction, "is no share of a memory", "above 0, at most 1")
    path = f"{role}.num_blocks"
    if section.num_blocks == 0 and section.device == "cpu":
        problem = "is chosen by the memory of a GPU, and the device is a CPU"
        raise ConfigError(path, 0, problem, '"auto", or 2 or more')
    if section.num_blocks:
        check_size(path, section.num_blocks, 2)


def max_ahead_of(section: WorkerSection) -> int:
    """Steps whose results may be unread when another is launched."""
    is_auto = section.overlap_steps == "auto"
    return int(section.device == "cuda" if is_auto else section.overlap_steps == "on")
