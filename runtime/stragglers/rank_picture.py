"""An instance whose ranks wait for one another, as people are shown it: a matrix and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.pb import registry_pb2
from runtime.stragglers.rank_waits import RankBlock, WaitWindow
from runtime.stragglers.slow_ranks import Finding, SlowKind, describe_finding

ADVICE = {
    SlowKind.SENDER: "look at its clocks, power and temperature (nvidia-smi -q -d PERFORMANCE), "
    "and at what else runs there; then drain and restart it elsewhere",
    SlowKind.RECEIVER: "give its experts copies (decode.num_redundant_experts), or balance them",
    SlowKind.LINK: "look at the link between the two (nvidia-smi nvlink -e; ethtool -S)",
    SlowKind.HOST: "look at what else runs on its host, and at its CPU's clocks and swapping",
    SlowKind.LOAD: "nothing is broken: it has longer contexts or more requests",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPicture:
    """The last 100 steps of one instance.

    Attributes:
        instance: its name.
        num_ranks: R.
        step_s: of a step.
        wait_shares: R * R, a receiver's row after the other: what it waited for each source, as a
            share of a step.
        findings: the worst first.
    """

    instance: str
    num_ranks: int
    step_s: float
    wait_shares: Sequence[float]
    findings: Sequence[Finding]

    def rows(self) -> list[list[float]]:
        """The matrix, [receiver][source]."""
        size = self.num_ranks
        return [list(self.wait_shares[rank * size : (rank + 1) * size]) for rank in range(size)]

    def waited_for(self, source: int) -> float:
        """The share of a step for which the median of the other ranks waits for one."""
        waits = [row[source] for rank, row in enumerate(self.rows()) if rank != source]
        return float(np.median(waits)) if waits else 0.0


def picture_of(instance: str, window: WaitWindow, findings: Sequence[Finding]) -> RankPicture:
    """Show a window of all ranks, and what was found in it."""
    return RankPicture(
        instance=instance,
        num_ranks=window.num_ranks,
        step_s=window.step_s,
        wait_shares=[float(share) for share in window.wait_shares().reshape(-1)],
        findings=findings,
    )


def words_of(finding: Finding) -> str:
    """Say a finding in a line: who, what, how much, and what shows it."""
    who = f"rank {finding.rank}"
    if finding.kind is SlowKind.LINK:
        who = f"link from rank {finding.source} to rank {finding.rank}"
    figures = finding.evidence
    shown = [f"{figures.get('excess_s', 0.0) * 1e6:.0f} us a step too long"]
    if finding.kind is SlowKind.RECEIVER:
        shown.append(f"{figures.get('rows_more', 0.0):+.0%} rows")
    elif finding.kind is SlowKind.LINK:
        shown.append(_way_of(figures))
    else:
        shown.append(f"{figures.get('load_more', 0.0):+.0%} load")
    return (
        f"{finding.kind.value}: {who}, {finding.ratio:.2f}x, costs {finding.share:.1%} of a step "
        f"({', '.join(shown)}; {finding.confidence:.0f} deviations)"
    )


def _way_of(figures: Mapping[str, float]) -> str:
    """Say whether bytes come slowly, or late from the first on."""
    phase = max(("dispatch", "combine"), key=lambda name: figures.get(f"wait_{name}_s", 0.0))
    wait, first = (figures.get(f"{what}_{phase}_s", 0.0) for what in ("wait", "first"))
    return "the first bytes come in time" if first < 0.5 * wait else "late from the first byte on"


def describe(picture: RankPicture) -> dict[str, object]:
    """For JSON."""
    return {
        "instance": picture.instance,
        "num_ranks": picture.num_ranks,
        "step_s": picture.step_s,
        "wait_shares": [[round(share, 5) for share in row] for row in picture.rows()],
        "findings": [
            {
                **describe_finding(finding),
                "text": words_of(finding),
                "advice": ADVICE[finding.kind],
                "is_fault": finding.kind.is_fault,
            }
            for finding in picture.findings
        ],
    }


def block_to_proto(block: RankBlock) -> registry_pb2.RankBlock:
    """As a renewal carries it."""
    return registry_pb2.RankBlock(
        number=block.number,
        waits_s=[wait for row in block.waits_s for wait in row],
        own_s=block.own_s,
        own_mean_s=block.own_mean_s,
        num_rows=block.num_rows,
        num_tokens=block.num_tokens,
        num_context_tokens=block.num_context_tokens,
        first_waits_s=[wait for row in block.first_waits_s for wait in row],
    )


def block_from_proto(message: registry_pb2.RankBlock) -> RankBlock:
    """The inverse of `block_to_proto`."""
    num_phases = max(1, len(message.own_s))
    size = len(message.waits_s) // num_phases

    def by_phase(waits: Sequence[float]) -> list[list[float]]:
        return [list(waits[p * size : (p + 1) * size]) for p in range(num_phases)]

    return RankBlock(
        number=message.number,
        waits_s=by_phase(message.waits_s),
        first_waits_s=by_phase(message.first_waits_s) if message.first_waits_s else (),
        own_s=list(message.own_s),
        own_mean_s=list(message.own_mean_s),
        num_rows=message.num_rows,
        num_tokens=message.num_tokens,
        num_context_tokens=message.num_context_tokens,
    )


def picture_to_proto(picture: RankPicture) -> registry_pb2.RankPicture:
    """As the control process tells its HTTP processes."""
    return registry_pb2.RankPicture(
        instance=picture.instance,
        num_ranks=picture.num_ranks,
        step_s=picture.step_s,
        wait_shares=picture.wait_shares,
        findings=[
            registry_pb2.RankFinding(
                kind=finding.kind.value,
                rank=finding.rank,
                source=finding.source,
                ratio=finding.ratio,
                share=finding.share,
                confidence=finding.confidence,
                evidence=dict(finding.evidence),
            )
            for finding in picture.findings
        ],
    )


def picture_from_proto(message: registry_pb2.RankPicture) -> RankPicture:
    """The inverse of `picture_to_proto`."""
    return RankPicture(
        instance=message.instance,
        num_ranks=message.num_ranks,
        step_s=message.step_s,
        wait_shares=list(message.wait_shares),
        findings=[
            Finding(
                kind=SlowKind(finding.kind),
                rank=finding.rank,
                source=finding.source,
                ratio=finding.ratio,
                share=finding.share,
                confidence=finding.confidence,
                evidence=dict(finding.evidence),
            )
            for finding in message.findings
        ],
    )
