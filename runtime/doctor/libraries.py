"""Whether the libraries that are installed are those that this version was made with."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from runtime.doctor.finding import Finding, Verdict

_PACKAGE = "tandem-serve"
_EXTRA = "gpu"
_PIN = re.compile(r"([A-Za-z0-9._-]+)\s*==\s*([^\s;]+)")
_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def gpu_pins() -> dict[str, str]:
    """The versions of the ``gpu`` extra by package; from the installed package, or its sources."""
    try:
        lines = metadata.requires(_PACKAGE) or []
        lines = [line for line in lines if re.search(rf"extra\s*==\s*['\"]{_EXTRA}['\"]", line)]
    except metadata.PackageNotFoundError:
        lines = []
    if not lines and _PYPROJECT.exists():
        project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
        lines = project["optional-dependencies"][_EXTRA]
    return {found[1]: found[2] for line in lines if (found := _PIN.match(line))}


def cuda_major(pins: Mapping[str, str]) -> int | None:
    """The major version of CUDA that the pinned packages are built for."""
    found = [re.search(r"-?cu(?:da)?(\d\d)$", name) for name in pins]
    return max((int(match[1]) for match in found if match), default=None)


def installed_version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_libraries(
    pins: Mapping[str, str], version_of: Callable[[str], str] = installed_version
) -> Iterator[Finding]:
    """Libraries of the GPU set that are missing, or of another version."""
    found = {name: version_of(name) for name in pins}
    missing = [name for name, version in found.items() if not version]
    # A build of torch has its CUDA behind a plus: 2.14.1+cu130.
    others = [
        f"{name} {version} (made with {pins[name]})"
        for name, version in found.items()
        if version and version.partition("+")[0] != pins[name].partition("+")[0]
    ]
    fix = f'pip install "{_PACKAGE}[{_EXTRA}]"'
    if missing:
        text = f"not installed: {', '.join(missing)}; slower kernels and transports are used"
        yield Finding(check="libraries", verdict=Verdict.WARNING, text=text, fix=fix)
    if others:
        text = f"other versions: {', '.join(others)}"
        yield Finding(check="libraries", verdict=Verdict.WARNING, text=text, fix=fix)
    if pins and not missing and not others:
        text = f"all {len(pins)} of the GPU set are as pinned"
        yield Finding(check="libraries", verdict=Verdict.OK, text=text)
