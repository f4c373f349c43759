"""Two machines, started word for word as README and docs/use/multi-node.md say it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.cluster import HostedCluster
from tests.hosts.hosts import ROOT, Hosts, why_no_hosts

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts here: {why_no_hosts()}"),
]

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "use" / "multi-node.md"
SECRET = "ab" * 32


def section(path: Path, heading: str) -> str:
    """What a page says below a heading."""
    return path.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    """The examples in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@dataclass(frozen=True, slots=True)
class Machines:
    """10.0.0.1 and 10.0.0.2 of the pages: hosts "a" and "b", with a folder to work in."""

    hosts: Hosts
    folder: Path

    def here(self, text: str) -> str:
        """What a page says, with the addresses that there are."""
        text = text.replace("10.0.0.0/24", self.hosts.network)
        for number, name in ((1, "a"), (2, "b")):
            text = text.replace(f"10.0.0.{number}", self.hosts[name].address)
        return text

    def run(self, name: str, script: str) -> str:
        """Run a script of a page on a host; its output."""
        script = self.here(script).replace("$(openssl rand -hex 32)", SECRET)
        script = re.sub(r"(?<==)SECRET\b", SECRET, script)
        # Hosts of this test have the same /tmp.
        temporary = f"/tmp/th-{self.hosts.token}-{name}"
        script = script.replace("ray start", f"ray start --temp-dir={temporary}")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.folder),
        }
        script = f"set -e; cd {self.folder}\n{script}"
        result = self.hosts.run(name, "bash", "-c", script, environment=environment)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def write_configuration(self) -> None:
        """The file of the page, under the name that both pages give it."""
        (config,) = blocks(section(PAGE, "Two machines"), "toml")
        (self.folder / "two-machines.toml").write_text(self.here(config), encoding="utf-8")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Hosts("ab") as hosts:
        yield Machines(hosts, tmp_path)
    HostedCluster(hosts, tmp_path).clean_up()


def test_two_machines_serve_as_the_page_says(machines: Machines) -> None:
    head, joining, commands = blocks(section(PAGE, "Two machines"), "bash")
    secret = "".join(line + "\n" for line in head.splitlines() if "RAY_AUTH_TOKEN" in line)
    machines.run("a", head)
    machines.run("b", secret + joining)
    machines.write_configuration()
    output = machines.run("a", secret + commands)
    assert "def fibonacci(n):" in output
    assert "stopped tandem" in output


def test_two_machines_serve_as_the_readme_says(machines: Machines) -> None:
    (commands,) = blocks(section(README, "Several machines"), "bash")
    secret, head, joining, up = commands.splitlines()
    assert [line.partition("# on ")[2].split(":")[0] for line in (secret, head, joining, up)] == [
        "every machine",
        "the first",
        "the others",
        "the first",
    ]
    machines.run("a", f"{secret}\n{head}")
    machines.run("b", f"{secret}\n{joining}")
    machines.write_configuration()
    up = up.partition("#")[0]
    (others,) = (one for one in blocks(README.read_text(), "bash") if "tandem generate" in one)
    generate, down = (
        next(line for line in others.splitlines() if line.startswith(f"tandem {name}"))
        for name in ("generate", "down")
    )
    output = machines.run(
        "a",
        f"{secret}\n{up} &\nup=$!\n"
        "until tandem status > status; do kill -0 $up; sleep 0.5; done\n"
        f"cat status\n{generate}\n{down}\nwait $up\n",
    )
    assert "decode     1/1" in output
    assert "def fibonacci(n):" in output
    assert "stopped tandem" in output
