"""What differs between two configurations, and whether a cluster that runs can take it on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deploy.checks.cluster import resolve_config
from deploy.control.difference import check_can_change, difference, rolled_roles
from deploy.control.settings import resolved_like
from deploy.errors import WrongArgumentError
from deploy.plan import Role
from runtime.config import ClusterConfig, DecodeSection, PrefillSection, RouterSection, TierSection
from tests.deploy.fakes import fake_config, write_model


def changed(config: ClusterConfig, section: str, **values: Any) -> ClusterConfig:
    former = getattr(config, section)
    return dataclasses.replace(config, **{section: dataclasses.replace(former, **values)})


def test_every_field_is_said_what_its_change_takes() -> None:
    """Also one that is added tomorrow: its section decides."""
    old = ClusterConfig()
    for section_field in dataclasses.fields(ClusterConfig):
        section = getattr(old, section_field.name)
        if isinstance(section, tuple):
            continue
        for item in dataclasses.fields(section):
            path = f"{section_field.name}.{item.name}"
            # Not through __init__, which refuses most values that are not meant.
            other = object.__new__(type(section))
            for one in dataclasses.fields(section):
                object.__setattr__(other, one.name, getattr(section, one.name))
            object.__setattr__(other, item.name, "something else")
            new = object.__new__(ClusterConfig)
            for one in dataclasses.fields(ClusterConfig):
                object.__setattr__(new, one.name, getattr(old, one.name))
            object.__setattr__(new, section_field.name, other)
            changes = difference(old, new)
            if path in ("cluster.secret", "cluster.previous_secret"):
                assert changes == ()
            else:
                (change,) = changes
                assert change.field == path
                assert change.effect


@pytest.mark.parametrize(
    ("section", "values", "effect", "roles"),
    [
        ("decode", {"max_num_seqs": 8}, "rolling restart of decode", {Role.DECODE}),
        ("prefill", {"num_blocks": 300}, "rolling restart of prefill", {Role.PREFILL}),
        (
            "kv_transfer",
            {"layers_per_group": 2},
            "rolling restart of prefill and decode",
            {Role.PREFILL, Role.DECODE},
        ),
        ("router", {"queue_timeout_s": 3.0}, "rolling restart of router", {Role.ROUTER}),
        ("decode", {"instances": 3}, "scale decode", set()),
        ("cluster", {"boot_timeout_s": 9.0}, "none now; read by every worker that starts", set()),
    ],
)
def test_what_a_change_takes(
    section: str, values: dict[str, object], effect: str, roles: set[Role]
) -> None:
    old = ClusterConfig()
    changes = difference(old, changed(old, section, **values))
    assert [change.effect for change in changes] == [effect]
    assert rolled_roles(changes) == roles
    check_can_change(changes)


@pytest.mark.parametrize(("old", "new"), [(0, 1), (0, "auto"), (3, 0)])
def test_drafts_or_none_cannot_change_as_both_roles_have_the_layer_or_not(
    old: int | str, new: int | str
) -> None:
    """Decode alone would be restarted, and find no prefill worker of its layout."""
    running = changed(ClusterConfig(), "decode", num_speculative_tokens=old)
    wanted = changed(running, "decode", num_speculative_tokens=new)
    named = rf"decode\.num_speculative_tokens = .* Fix: {old}, as it runs; or a second cluster"
    with pytest.raises(WrongArgumentError, match=named):
        check_can_change(difference(running, wanted))


def test_a_file_that_says_nothing_of_drafts_turns_none_on(tmp_path: Path) -> None:
    """A cluster that runs without, as by an earlier default, is told by name."""
    write_model(tmp_path, num_nextn_predict_layers=1)
    running = changed(fake_config(tmp_path), "decode", num_speculative_tokens=0)
    silent = changed(running, "decode", num_speculative_tokens="default")
    wanted = resolved_like(silent, running, tmp_path)
    named = r"decode\.num_speculative_tokens = 1: is 0 in the cluster .* Fix: 0, as it runs"
    with pytest.raises(WrongArgumentError, match=named):
        check_can_change(difference(running, wanted))


def test_a_file_that_says_nothing_of_drafts_is_no_difference_to_what_it_started(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, num_nextn_predict_layers=1)
    silent = changed(fake_config(tmp_path), "decode", num_speculative_tokens="default")
    running = resolve_config(silent)
    assert running.decode.num_speculative_tokens == 1
    assert difference(running, resolved_like(silent, running, tmp_path)) == ()


@pytest.mark.parametrize(("old", "new"), [(1, 3), ("auto", 1)])
def test_another_number_of_drafts_is_a_matter_of_decode(old: int | str, new: int | str) -> None:
    running = changed(ClusterConfig(), "decode", num_speculative_tokens=old)
    (change,) = difference(running, changed(running, "decode", num_speculative_tokens=new))
    assert change.rolls == {Role.DECODE}
    check_can_change([change])


def test_other_tiers_restart_the_router_alone() -> None:
    old = ClusterConfig()
    new = dataclasses.replace(old, tiers=(TierSection(name="max"), TierSection(name="b", order=1)))
    (change,) = difference(old, new)
    assert (change.field, change.effect) == ("tiers", "rolling restart of router")
    assert change.rolls == {Role.ROUTER}
    assert difference(new, new) == ()


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model", {"path": "/models/other"}),
        ("model", {"dtype": "bfloat16"}),
        ("cluster", {"name": "other"}),
        ("cluster", {"host": "10.0.0.1"}),
        ("router", {"port": 9000}),
        ("tls", {"mutual": False}),
        ("kv_transfer", {"transport": "nixl"}),
    ],
)
def test_what_cannot_change_is_refused_by_its_field_with_the_fix(
    section: str, values: dict[str, object]
) -> None:
    old = ClusterConfig()
    (field,) = values
    with pytest.raises(WrongArgumentError, match=rf"{section}\.{field} = .* Fix: "):
        check_can_change(difference(old, changed(old, section, **values)))


def test_all_that_cannot_change_is_named_at_once() -> None:
    old = ClusterConfig()
    new = dataclasses.replace(
        old, prefill=PrefillSection(block_size=32), decode=DecodeSection(block_size=32)
    )
    with pytest.raises(WrongArgumentError) as raised:
        check_can_change(difference(old, new))
    lines = str(raised.value).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["prefill.block_size", "decode.block_size"]
    assert all("is 64 in the cluster that runs" in line for line in lines)


def test_what_a_file_leaves_open_is_no_difference(tmp_path: Path) -> None:
    running = fake_config(tmp_path)
    folder = tmp_path / "tls"
    made = dataclasses.replace(
        running.tls,
        mode="files",
        cert=str(folder / "cert.pem"),
        key=str(folder / "key.pem"),
        ca=str(folder / "ca.pem"),
    )
    running = dataclasses.replace(running, tls=made)
    wanted = dataclasses.replace(
        running,
        router=dataclasses.replace(running.router, port=0, control_port=0),
        tls=dataclasses.replace(running.tls, mode="auto", cert="", key="", ca=""),
        model=dataclasses.replace(running.model, name="fake-model"),
    )
    assert difference(running, resolved_like(wanted, running, folder)) == ()
    other = dataclasses.replace(wanted, router=RouterSection(port=1, control_port=0))
    changes = difference(running, resolved_like(other, running, folder))
    assert [change.field for change in changes] == ["router.port"]
