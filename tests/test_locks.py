"""The locks in requirements/: what pyproject.toml asks for, alike, from nowhere in particular."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.install import read_sources
from scripts.locks import FOLDER, LOCKS, PYTHONS, ROOT, Lock, blocks, pins, without_cuda

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
ENTRIES = re.compile(
    r"([a-z0-9-]+==[a-zA-Z0-9.]+( ; [^/@\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n)+"
)
OF_PYTORCH = re.compile(r"torch|triton|(nvidia|cuda)-.*")


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def asked_of(lock: Lock) -> Iterator[Requirement]:
    """What pyproject.toml asks of an environment."""
    asked: list[str] = []
    if lock.project:
        asked += PROJECT["build-system"]["requires"] + PROJECT["project"]["dependencies"]
    for extra in lock.extras:
        asked += PROJECT["project"]["optional-dependencies"][extra]
    for group in lock.groups:
        for each in PROJECT["dependency-groups"][group]:
            whole = isinstance(each, dict)
            asked += PROJECT["dependency-groups"][each["include-group"]] if whole else [each]
    return map(Requirement, asked)


def versions(name: str, python: str) -> dict[str, str]:
    """The version of each package of a lock on Linux."""
    env = LINUX | {"python_version": python, "python_full_version": f"{python}.1"}
    found = [Requirement(pin) for pin in pins(text_of(name))]
    here = [each for each in found if each.marker is None or each.marker.evaluate(env)]
    assert len({each.name for each in here}) == len(here)
    return {each.name: str(each.specifier).removeprefix("==") for each in here}


def test_every_file_is_a_lock() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(LOCKS)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_is_asked_for(name: str) -> None:
    lock = LOCKS[name]
    for python in PYTHONS if "--universal" in lock.target else ["3.12"]:
        found = versions(name, python)
        asked = list(asked_of(lock))
        assert asked
        for each in asked:
            assert each.specifier.contains(found[canonicalize_name(each.name)], prereleases=True)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_exact_versions_and_hashes_and_no_place(name: str) -> None:
    text = text_of(name)
    said = "".join(
        line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#")
    )
    assert ENTRIES.fullmatch(said)
    comments = [line for line in text.splitlines() if line.lstrip().startswith("#")]
    assert not re.search(r"://|/\w+/|\blocalhost\b| -c | -r /", "\n".join(comments))


@pytest.mark.parametrize("name", [name for name, lock in LOCKS.items() if lock.like])
def test_locks_differ_in_pytorch_and_what_they_ask_for_alone(name: str) -> None:
    mine, theirs = versions(name, "3.12"), versions(LOCKS[name].like, "3.12")
    own = {each.name for each in asked_of(LOCKS[name]) if str(each.specifier).startswith("==")}
    both = {each for each in mine.keys() & theirs.keys() - own if not OF_PYTORCH.fullmatch(each)}
    assert len(both) > 10
    assert {each: mine[each] for each in both} == {each: theirs[each] for each in both}


def test_a_cpu_build_brings_no_cuda() -> None:
    for name in ("runtime", "dev", "kernels"):
        left = blocks(without_cuda(text_of(name)))
        gone = blocks(text_of(name)).keys() - left.keys()
        assert {"torch", "nvidia-cublas", "nvidia-nccl-cu13", "cuda-toolkit"} <= gone
        assert "triton" in left
        assert not [each for each in left if each.startswith(("nvidia-", "cuda-"))]
    assert "nvidia-ml-py" in blocks(without_cuda(text_of("clients"))), "aiperf asks for it"


PACKAGES = ("torch", "numpy", "client", "nvidia-a", "nvidia-b", "cuda-c", "cuda-d")


@given(st.dictionaries(st.sampled_from(PACKAGES), st.sets(st.sampled_from([*PACKAGES, "tandem"]))))
def test_what_others_ask_for_stays(askers: dict[str, set[str]]) -> None:
    """Left is what somebody reaches who is neither PyTorch nor a library of CUDA."""
    text = "".join(
        f"{name}==1 \\\n    --hash=sha256:00\n    # via\n"
        + "".join(f"    #   {each}\n" for each in sorted(by & {*askers, "tandem"}))
        for name, by in askers.items()
    )

    def wanted(name: str, seen: frozenset[str]) -> bool:
        if name == "torch" or name in seen:
            return False
        if not name.startswith(("nvidia-", "cuda-")):
            return name in askers or name == "tandem"
        return any(wanted(each, seen | {name}) for each in askers.get(name, ()))

    assert list(blocks(without_cuda(text))) == [
        each for each in askers if wanted(each, frozenset())
    ]


CONFIG = """
:env:.find-links='/wheels /more'
:env:.index-url='https://here/simple'
global.extra-index-url='https://cpu/simple'
global.index-url='https://everywhere/simple'
install.trusted-host='a b'
global.cert='/ca.pem'
global.timeout='60'
"""


def test_packages_come_from_where_pip_is_told() -> None:
    sources = read_sources(CONFIG, ())
    assert sources.flags() == [
        "--default-index=https://here/simple",
        "--find-links=/wheels",
        "--find-links=/more",
        "--allow-insecure-host=a",
        "--allow-insecure-host=b",
    ]
    assert "--index=https://cpu/simple" in sources.flags_of_torch()
    assert sources.environment()["SSL_CERT_FILE"] == "/ca.pem"


def test_arguments_stand_above_what_pip_is_told() -> None:
    given = ["--index-url", "https://mine/simple", "--extra-index-url=https://two/simple"]
    sources = read_sources(CONFIG, [*given, "-f", "/three", "--no-index"])
    assert sources.index_url == "https://mine/simple"
    assert sources.extra_index_urls == ("https://cpu/simple", "https://two/simple")
    assert sources.find_links == ("/wheels", "/more", "/three")
    assert sources.no_index


def test_other_arguments_of_pip_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--upgrade.*Fix: --index-url"):
        read_sources("", ["--upgrade"])
