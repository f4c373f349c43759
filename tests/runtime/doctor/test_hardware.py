"""GPUs, cards and which belongs to which, on hosts that are laid out in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.doctor.finding import Finding, Verdict
from runtime.doctor.gpus import check_driver, check_gpus, driver_version, read_gpus, visible_gpus
from runtime.doctor.pairing import check_pairing, chosen_by, pair_up
from runtime.doctor.pci import Distance
from runtime.doctor.rdma import check_ports, read_nics
from tests.runtime.doctor.fake_host import FakeHost, four_pairs


def pairing(host: FakeHost, **environment: str) -> list[Finding]:
    gpus = visible_gpus(read_gpus(host.root), environment)
    return list(check_pairing(gpus, read_nics(host.root), environment))


def wrong(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings if finding.is_wrong]


def test_each_gpu_is_paired_with_the_card_on_its_switch(tmp_path: Path) -> None:
    host = four_pairs(tmp_path)
    pairs = pair_up(read_gpus(host.root), read_nics(host.root))
    assert [pair.nic.name for pair in pairs] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert {pair.distance for pair in pairs} == {Distance.SWITCH}
    (finding,) = pairing(host)
    assert finding.verdict is Verdict.OK
    assert "GPU 3 mlx5_3; at worst on the same PCIe switch" in finding.text


def test_distances_are_told_apart(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.add_gpu("pci0000:00/0000:00:01.0/0000:01:00.0", numa=0)
    host.add_nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:02:00.0", numa=0)
    host.add_nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:03:00.0", numa=0)
    host.add_nic("mlx5_2", "pci0000:40/0000:40:01.0/0000:41:00.0", numa=0)
    host.add_nic("mlx5_10", "pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    (gpu,) = read_gpus(host.root)
    nics = read_nics(host.root)
    assert [nic.name for nic in nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    assert [gpu.device.distance_to(nic.device) for nic in nics] == list(Distance)


def test_gpus_share_cards_evenly_where_all_are_equally_near(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    for index in range(4):
        host.add_gpu(f"pci0000:00/0000:00:0{index}.0")
    for index in range(2):
        host.add_nic(f"mlx5_{index}", f"pci0000:00/0000:00:1{index}.0")
    pairs = pair_up(read_gpus(host.root), read_nics(host.root))
    assert [pair.nic.name for pair in pairs] == ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_1"]


def test_a_card_that_is_down_leaves_its_gpu_with_a_far_one(tmp_path: Path) -> None:
    host = four_pairs(tmp_path, mlx5_2={"state": "1: DOWN"})
    (text,) = wrong(pairing(host))
    assert "GPU 2 goes by mlx5_3 (in the same NUMA node)" in text
    assert "mlx5_2 (on the same PCIe switch) is down. Fix: bring mlx5_2 up" in text
    (port,) = wrong(list(check_ports(read_nics(host.root))))
    assert "mlx5_2 port 1 is DOWN" in port
    assert "Fix: look at the cable" in port


def test_a_port_slower_than_its_neighbours_is_told(tmp_path: Path) -> None:
    host = four_pairs(tmp_path, mlx5_1={"rate": 200})
    (text,) = wrong(list(check_ports(read_nics(host.root))))
    assert "mlx5_1 port 1 runs at 200 Gb/s, cards of its kind here at 400 Gb/s" in text
    assert wrong(pairing(host)) == []


def test_a_card_of_another_kind_may_be_slower(tmp_path: Path) -> None:
    host = four_pairs(tmp_path)
    other = ("0x15b3", "0x101f")
    host.add_nic("mlx5_9", "pci0000:90/0000:90:01.0", rate=25, kind=other)
    assert wrong(list(check_ports(read_nics(host.root)))) == []
    assert wrong(pairing(host)) == []


@pytest.mark.parametrize("variable", ["UCX_NET_DEVICES=mlx5_0:1", "NCCL_IB_HCA=mlx5_0"])
def test_a_variable_that_pairs_gpus_with_far_cards_is_told(tmp_path: Path, variable: str) -> None:
    name, _, value = variable.partition("=")
    texts = wrong(pairing(four_pairs(tmp_path), **{name: value}))
    assert len(texts) == 3
    assert f"{variable} pairs GPU 2 with mlx5_0 (across NUMA nodes)" in texts[1]
    assert "mlx5_2 is on the same PCIe switch" in texts[1]


def test_a_rank_that_sees_one_gpu_may_name_the_card_of_that(tmp_path: Path) -> None:
    host = four_pairs(tmp_path)
    assert wrong(pairing(host, CUDA_VISIBLE_DEVICES="2", UCX_NET_DEVICES="mlx5_2:1")) == []
    (text,) = wrong(pairing(host, CUDA_VISIBLE_DEVICES="2", UCX_NET_DEVICES="mlx5_1:1"))
    assert "pairs GPU 2 with mlx5_1" in text


def test_a_variable_that_names_no_card_of_this_host_is_told(tmp_path: Path) -> None:
    (text,) = wrong(pairing(four_pairs(tmp_path), UCX_NET_DEVICES="mlx5_7:1"))
    assert "names none of the cards that are here" in text
    assert "one of mlx5_0, mlx5_1" in text


def test_the_variables_are_read_as_their_libraries_read_them(tmp_path: Path) -> None:
    host = four_pairs(tmp_path)
    host.add_nic("mlx5_10", "pci0000:90/0000:90:01.0")
    nics = read_nics(host.root)

    def names(variable: str, value: str) -> list[str] | None:
        chosen = chosen_by(variable, value, nics)
        return None if chosen is None else [nic.name for nic in chosen]

    assert names("UCX_NET_DEVICES", "mlx5_1:1,mlx5_3:1") == ["mlx5_1", "mlx5_3"]
    assert names("NCCL_IB_HCA", "mlx5_1") == ["mlx5_1", "mlx5_10"]
    assert names("NCCL_IB_HCA", "=mlx5_1") == ["mlx5_1"]
    assert names("NCCL_IB_HCA", "^mlx5_1,mlx5_2") == ["mlx5_0", "mlx5_3"]
    assert names("UCX_NET_DEVICES", "all") is None
    assert names("UCX_NET_DEVICES", "lo") is None
    assert names("UCX_NET_DEVICES", "eth0,ens1f0") is None
    assert names("NCCL_IB_HCA", "") is None


def test_gpus_of_a_socket_without_a_card_are_told(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    for index in range(2):
        gpu, nic = host.behind_switch(index)
        host.add_gpu(gpu, numa=index)
        if index == 0:
            host.add_nic("mlx5_0", nic, numa=index)
    (text,) = wrong(pairing(host))
    assert "GPU 1: no card of their own NUMA node" in text


def test_a_host_without_cards_or_gpus_has_nothing_to_pair(tmp_path: Path) -> None:
    assert pairing(FakeHost(tmp_path)) == []
    (finding,) = check_ports(read_nics(tmp_path))
    assert (finding.verdict, finding.is_wrong) == (Verdict.NOTE, False)


def test_a_narrow_pcie_link_is_told(tmp_path: Path) -> None:
    host = four_pairs(tmp_path)
    place = f"sys/devices/{host.behind_switch(1)[1]}"
    for name, text in {
        "current_link_width": "8",
        "max_link_width": "16",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
    }.items():
        host.write(f"{place}/{name}", text)
    (text,) = wrong(list(check_ports(read_nics(host.root))))
    assert "the PCIe link of mlx5_1 (0000:19:00.0) is x8 at 32 GT/s, it can x16" in text


@pytest.mark.parametrize("wanted", [True, False])
def test_a_host_without_gpus_is_an_error_only_where_they_are_wanted(
    tmp_path: Path, wanted: bool
) -> None:
    (finding,) = check_gpus(tmp_path, read_gpus(tmp_path), wanted=wanted)
    assert finding.verdict is (Verdict.ERROR if wanted else Verdict.NOTE)


def test_gpus_without_a_driver_or_device_files_are_told(tmp_path: Path) -> None:
    host = four_pairs(tmp_path)
    (finding,) = check_gpus(tmp_path, read_gpus(tmp_path), wanted=True)
    assert finding.text == "4 x NVIDIA H200, driver 580.65.06"
    for node in (tmp_path / "dev").iterdir():
        node.unlink()
    (finding,) = check_gpus(tmp_path, read_gpus(tmp_path), wanted=True)
    assert (finding.verdict, "no /dev/nvidia0" in finding.text) == (Verdict.ERROR, True)
    (host.root / "sys/module/nvidia/version").unlink()
    (finding,) = check_gpus(tmp_path, read_gpus(tmp_path), wanted=True)
    assert "driver is not loaded" in finding.text


def test_without_the_driver_s_list_gpus_are_found_on_pci(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.add_device(
        "pci0000:00/0000:00:05.0", numa=0, kind=("0x10de", "0x2330"), pci_class="0x030200"
    )
    host.add_device(
        "pci0000:00/0000:00:06.0", numa=0, kind=("0x10de", "0x22a3"), pci_class="0x068000"
    )
    assert [gpu.device.address for gpu in read_gpus(host.root)] == ["0000:00:05.0"]


def test_a_driver_too_old_for_our_cuda_is_told(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    assert list(check_driver(tmp_path, 13)) == []
    host.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build",
    )
    assert driver_version(tmp_path) == "570.124.06"
    (finding,) = check_driver(tmp_path, 13)
    assert finding.is_wrong
    assert "CUDA 13 needs 580 or newer" in finding.text
    (finding,) = check_driver(tmp_path, 12)
    assert finding.verdict is Verdict.OK
