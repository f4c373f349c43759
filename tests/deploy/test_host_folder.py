"""What is laid on a host for a process, and what of it stays."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.certificates import Authority, KeyRequest, check_certificate
from deploy.errors import ClusterError
from deploy.hosts.folder import host_folder, lay_files, remove_files
from deploy.hosts.places import Place, Places
from deploy.plan import KEY_NAME, ProcessSpec, plan_instances, process_specs
from runtime.config.file import load_config
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from tests.deploy.fakes import fake_config, fake_context


def specs_on(folder: Path, host_a: str, host_b: str, run_id: str = "one") -> list[ProcessSpec]:
    """The two ranks of decode-0, on two hosts that see one file system."""
    config = fake_config(folder, decode_dp=2)
    cluster = dataclasses.replace(config.cluster, ray_address="10.0.0.1:6379", network="10.0.0.0/8")
    tls = dataclasses.replace(config.tls, mode="files", cert="/c", key="/k", ca="/a")
    config = dataclasses.replace(config, cluster=cluster, tls=tls)
    context = dataclasses.replace(
        fake_context(config, folder),
        run_id=run_id,
        tls_pem={"cert": "certificate", "key": "key", "ca": "authority"},
    )
    ranks = tuple(
        Place(
            bind=host,
            node=host,
            interface="eth7",
            folder=str(host_folder(config.cluster.name, str(folder), host)),
        )
        for host in (host_a, host_b)
    )
    places = Places(ranks=ranks, rendezvous="10.0.0.3:99")
    return list(process_specs(plan_instances(config)[2], context, places))


def test_a_process_finds_its_hosts_own_configuration_and_certificates(tmp_path: Path) -> None:
    hosts = ("10.0.0.3", "10.0.0.4")
    for spec, host in zip(specs_on(tmp_path, *hosts), hosts, strict=True):
        lay_files(spec)
        path = Path(spec.command[spec.command.index("--config") + 1])
        config = load_config(path)
        assert (config.cluster.host, config.cluster.network) == (host, "")
        assert config.cluster.ray_address == "local"
        assert Path(config.tls.key).read_text() == "key"
        assert Path(config.tls.cert).is_relative_to(spec.folder)
        for file in path.parent.iterdir():
            assert file.stat().st_mode & 0o077 == 0
        assert spec.default_env["GLOO_SOCKET_IFNAME"] == "eth7"
        assert host in spec.log_path
        remove_files(spec)
        assert not path.parent.exists()


def test_a_process_shows_a_certificate_for_the_key_that_it_has_made(tmp_path: Path) -> None:
    authority = Authority.make()
    config = fake_config(tmp_path)
    cluster = dataclasses.replace(config.cluster, ray_address="10.0.0.1:6379")
    tls = dataclasses.replace(config.tls, mode="files", cert="/c", key="/k", ca="/a")
    config = dataclasses.replace(config, cluster=cluster, tls=tls)
    context = dataclasses.replace(fake_context(config, tmp_path), authority=authority)
    made = KeyRequest.make(("host-3",))
    folder = str(host_folder(config.cluster.name, str(tmp_path), "10.0.0.3"))
    place = Place(bind="10.0.0.3", node="3", folder=folder, request=made.request)
    places = Places(ranks=(place,), rendezvous="10.0.0.3:99")
    (spec,) = process_specs(plan_instances(config)[1], context, places)
    assert "PRIVATE KEY" not in str(dict(spec.files))
    lay_files(spec, {KEY_NAME: made.key})
    found = load_config(Path(spec.command[spec.command.index("--config") + 1])).tls.files
    assert found is not None
    check_certificate(found, ("10.0.0.3", "host-3"))
    credentials = Credentials(secret="s", tls=found, role=Role.PREFILL)
    credentials.check_certificate("10.0.0.3")
    with pytest.raises(ConfigError, match="names the role prefill: this is a controller"):
        dataclasses.replace(credentials, role=Role.CONTROLLER).check_certificate("10.0.0.3")
    remove_files(spec)
    assert not Path(found.key).exists()


def test_a_new_run_begins_with_no_logs_and_a_restart_keeps_them(tmp_path: Path) -> None:
    first = specs_on(tmp_path, "10.0.0.3", "10.0.0.3")[0]
    lay_files(first)
    log = Path(first.log_path)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("said")
    lay_files(first)
    assert log.read_text() == "said"
    lay_files(specs_on(tmp_path, "10.0.0.3", "10.0.0.3", "two")[1])
    assert not log.exists()


def test_ranks_that_start_at_the_same_time_keep_each_others_logs(tmp_path: Path) -> None:
    """Each begins the run if the others have not, and writes its log as soon as it has begun."""
    specs = specs_on(tmp_path, "10.0.0.3", "10.0.0.3") * 4
    for round_ in range(30):
        run = [
            dataclasses.replace(
                spec,
                env={**spec.env, "TANDEM_CLUSTER": f"run {round_}"},
                folder=f"{spec.folder}-{index}",
                log_path=f"{spec.log_path.removesuffix('.log')}-{index}.log",
            )
            for index, spec in enumerate(specs)
        ]
        with ThreadPoolExecutor(len(run)) as threads:
            list(threads.map(start, run))
        assert all(Path(spec.log_path).exists() for spec in run)


def start(spec: ProcessSpec) -> None:
    lay_files(spec)
    Path(spec.log_path).parent.mkdir(exist_ok=True)
    Path(spec.log_path).write_text("said")


def test_a_folder_that_cannot_be_made_names_the_host(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"on host 10\.0\.0\.3 .*cluster\.run_dir"):
        host_folder("fake", str(tmp_path / "file"), "10.0.0.3")
