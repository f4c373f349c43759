"""A decode worker over two hosts whose ranks are started by one command on each, without Ray.

Router and prefill worker on a, ranks 0 and 1 of the decode worker on b and c. The tests are one
story, in order.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.hosts.by_hand import ByHand, Command
from tests.hosts.hosts import Hosts, why_no_hosts
from tests.hosts.load import Expected, Load
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_no_hosts()), reason=f"no hosts here: {why_no_hosts()}"),
]

CONFIG = """\
[router]
allow_anonymous = true
lease_ttl_s = 3.0
worker_wait_s = 150.0
[decode]
dp = 2
step_timeout_s = 10.0
[kv_transfer]
transport = "loopback"
"""
END_S = 60.0
"""From the loss of a host until the commands on the others have ended."""


@dataclass(slots=True)
class Story:
    """What runs."""

    by_hand: ByHand
    decode: dict[str, Command] = field(default_factory=dict)
    """By host."""

    def start_decode(self, *hosts: str) -> None:
        """One command on each host."""
        for host in hosts:
            place = ("--hosts", "2", "--host-index", str("bc".index(host)))
            meeting = ("--rendezvous", f"{self.by_hand.hosts['b'].address}:9301")
            worker = self.by_hand.worker(host, "decode", "decode-0", *place, *meeting)
            self.decode[host] = worker


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with (
        Hosts("abc") as hosts,
        ByHand(hosts, tmp_path_factory.mktemp("by-hand"), dict.fromkeys("abc", CONFIG)) as by_hand,
    ):
        by_hand.router()
        by_hand.worker("a", "prefill", "prefill-0")
        story = Story(by_hand)
        story.start_decode("b", "c")
        by_hand.wait_ready("a", "b", "c")
        yield story


def some_more(load: Load, count: int = 2) -> None:
    since = time.monotonic()
    wait_until(lambda: load.num_answered_since(since) >= count, "requests are answered", 120)


def test_a_worker_of_two_hosts_answers_with_the_oracle_s_text(
    story: Story, expected: Expected
) -> None:
    with Load(story.by_hand.base_url, expected) as load:
        some_more(load, 8)
    assert load.failures == []


@pytest.mark.parametrize(("lost", "other", "rank"), [("c", "b", 0), ("b", "c", 1)])
def test_a_host_that_is_killed_ends_the_other_and_both_serve_again(
    story: Story, expected: Expected, lost: str, other: str, rank: int
) -> None:
    with Load(story.by_hand.base_url, expected) as load:
        some_more(load)
        story.by_hand.hosts.end_processes(lost)
        command = story.decode[other]
        assert command.ended(END_S) == 1
        said = command.said()
        assert "another rank was lost" in said
        assert f"decode-0/{rank} ended with status 1: the instance ends" in said
        story.start_decode("b", "c")
        story.by_hand.wait_ready("b", "c")
        some_more(load)
    assert load.failures == []


def test_a_host_that_is_cut_off_ends_the_other(story: Story, expected: Expected) -> None:
    hosts = story.by_hand.hosts
    with Load(story.by_hand.base_url, expected) as load:
        some_more(load)
        hosts.cut("c")
        commands = [story.decode[host] for host in "bc"]
        assert [command.ended(END_S) for command in commands] == [1, 1]
        hosts.rejoin("c")
        story.start_decode("b", "c")
        story.by_hand.wait_ready("b", "c")
        some_more(load)
    assert load.failures == []


def test_a_host_that_comes_late_is_waited_for(story: Story, expected: Expected) -> None:
    for host in "bc":
        story.by_hand.hosts.end_processes(host)
    story.start_decode("b")
    waits = "waits for the other ranks"
    wait_until(lambda: waits in story.decode["b"].said(), "it says what it waits for")
    story.start_decode("c")
    story.by_hand.wait_ready("b", "c")
    with Load(story.by_hand.base_url, expected) as load:
        some_more(load)
    assert load.failures == []


@pytest.mark.parametrize("told", ["c", "bc"], ids=["one host is told", "both are"])
def test_sigterm_drains_and_all_ranks_leave_in_order(
    story: Story, expected: Expected, told: str
) -> None:
    with Load(story.by_hand.base_url, expected) as load:
        some_more(load)
        for host in told:
            story.decode[host].signal(signal.SIGTERM)
        assert [story.decode[host].ended(END_S) for host in "bc"] == [0, 0]
        assert "killing" not in story.by_hand.said()
        story.start_decode("b", "c")
        story.by_hand.wait_ready("b", "c")
        some_more(load)
    assert load.failures == []
