"""Libraries, limits and names; and all checks together."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import ClusterConfig, ClusterSection
from runtime.doctor.examine import examine, examine_at_start
from runtime.doctor.finding import Verdict
from runtime.doctor.libraries import check_libraries, cuda_major, gpu_pins
from runtime.doctor.limits import Limits, check_host, check_limits
from runtime.doctor.network import check_free_ports, check_name
from runtime.errors import ConfigError
from tests.runtime.doctor.fake_host import FakeHost, four_pairs

PINS = {"torch": "2.14.1", "sgl-deep-ep": "0.1.2", "nixl-cu13": "1.5.1"}
GOOD = Limits(max_open_files=-1, max_locked_bytes=-1, shared_bytes=1 << 34)


def test_the_pins_are_those_of_the_gpu_extra() -> None:
    pins = gpu_pins()
    assert {"torch", "sgl-deep-ep", "sgl-deep-gemm", "nixl-cu13"} <= set(pins)
    assert cuda_major(pins) == 13


def test_libraries_as_pinned_are_well() -> None:
    installed = {**PINS, "torch": "2.14.1+cu130"}
    (finding,) = check_libraries(PINS, installed.__getitem__)
    assert finding.verdict is Verdict.OK


def test_missing_and_other_libraries_are_named() -> None:
    installed = {"torch": "2.13.0+cpu", "sgl-deep-ep": "", "nixl-cu13": "1.5.1"}
    missing, others = check_libraries(PINS, installed.__getitem__)
    assert "not installed: sgl-deep-ep" in missing.text
    assert others.text == "other versions: torch 2.13.0+cpu (made with 2.14.1)"
    assert missing.is_wrong
    assert others.is_wrong
    assert 'pip install "tandem-serve[gpu]"' in others.fix


def test_limits_are_judged_by_what_is_here() -> None:
    poor = Limits(max_open_files=1024, max_locked_bytes=8 << 20, shared_bytes=64 << 20)
    found = {f.check: f for f in check_limits(poor, num_files=9000, has_rdma=True, has_gpus=True)}
    assert [name for name, f in found.items() if f.is_wrong] == [
        "open files",
        "locked memory",
        "shared memory",
    ]
    assert "at most 8192 KiB" in found["locked memory"].text
    found = {f.check: f for f in check_limits(poor, num_files=9000, has_rdma=False, has_gpus=False)}
    assert [name for name, f in found.items() if f.is_wrong] == ["open files"]
    assert not [
        f for f in check_limits(GOOD, num_files=9000, has_rdma=True, has_gpus=True) if f.is_wrong
    ]


def test_the_host_is_described(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.write("proc/meminfo", "MemTotal:       2113929216 kB")
    host.write("proc/sys/kernel/numa_balancing", "1")
    for node in ("node0", "node1"):
        host.write(f"sys/devices/system/node/{node}/cpulist", "0")
    first, second = check_host(tmp_path, 192)
    assert first.text == "192 processors, 2016 GiB of memory, 2 NUMA nodes"
    assert "numa_balancing=0" in second.fix


def test_a_name_that_other_hosts_cannot_call_is_told() -> None:
    alone = ClusterConfig()
    open_ = ClusterConfig(cluster=ClusterSection(host="0.0.0.0", advertise="10.0.0.7"))

    def fails(name: str) -> str:
        raise OSError("Name or service not known")

    (finding,) = check_name(alone, "gpu-7", fails)
    assert finding.is_wrong
    (finding,) = check_name(alone, "gpu-7", lambda name: "127.0.1.1")
    assert not finding.is_wrong
    (finding,) = check_name(open_, "gpu-7", lambda name: "127.0.1.1")
    assert "gpu-7 is 127.0.1.1, which other hosts cannot call" in finding.text
    (finding,) = check_name(open_, "gpu-7", lambda name: "10.0.0.7")
    assert finding.verdict is Verdict.OK


def test_a_port_that_is_taken_is_told() -> None:
    import socket

    from runtime.config import RouterSection

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        config = ClusterConfig(router=RouterSection(port=port, control_port=0))
        (finding,) = check_free_ports(config)
    assert f"router.port = {port} is taken" in finding.text


def test_all_checks_come_together(tmp_path: Path) -> None:
    four_pairs(tmp_path, mlx5_2={"state": "1: DOWN"})
    found = list(examine(ClusterConfig(), root=tmp_path, environment={}))
    checks = {finding.check for finding in found}
    assert {"host", "GPUs", "driver", "libraries", "RDMA", "pairing", "open files"} <= checks
    (pairing,) = (finding for finding in found if finding.check == "pairing")
    assert pairing.text.startswith("GPU 2 goes by mlx5_3")


def test_a_rank_for_a_gpu_does_not_start_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        examine_at_start("decode", "cuda", root=tmp_path, environment={})
    assert caught.value.path == "decode.device"
    assert "no NVIDIA GPU is here" in caught.value.problem
    assert examine_at_start("decode", "cpu", root=tmp_path, environment={}) == []


def test_a_rank_starts_with_warnings_of_what_is_only_slower(tmp_path: Path) -> None:
    four_pairs(tmp_path, mlx5_2={"state": "1: DOWN"})
    found = examine_at_start("decode", "cuda", root=tmp_path, environment={})
    assert all(finding.verdict is Verdict.WARNING for finding in found)
    assert {"RDMA", "pairing"} <= {finding.check for finding in found}
