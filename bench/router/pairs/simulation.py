"""One policy on one trace: every request picked, computed and decoded under a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.router.pairs.engines import BLOCK_SIZE, DecodeEngine, Engine, Job, PrefillEngine, Speeds
from bench.router.pairs.traces import Session, Turn
from router.pool.members import Member, Role, WorkerKey
from router.pool.view import PoolView
from router.routing.policy import PairingPolicy
from router.routing.prefixes import Prefixes
from router.routing.request_shape import RequestShape
from runtime.block_hash import extend_hashes, max_cached_blocks

OUTPUT_TOKEN = 7
HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Outcome:
    """What one policy did."""

    ttfts_s: list[float] = field(default_factory=list)
    floors_s: list[float] = field(default_factory=list)
    """Of the same requests: with nobody else about and a cache of everything ever computed."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_oracle_tokens: int = 0
    """That a cache of everything ever computed would have given."""
    busy_s: list[float] = field(default_factory=list)
    """Of each prefill worker."""

    def row(self) -> dict[str, float]:
        """The figures."""
        times, floors = sorted(self.ttfts_s), sorted(self.floors_s)
        pairs = zip(self.ttfts_s, self.floors_s, strict=True)
        excess = sorted(ttft_s - floor_s for ttft_s, floor_s in pairs)
        mean = sum(self.busy_s) / len(self.busy_s)
        return {
            "requests": len(times),
            "ttft_p50_s": round(times[len(times) // 2], 4),
            "ttft_p99_s": round(times[int(0.99 * len(times))], 4),
            "ttft_mean_s": round(sum(times) / len(times), 4),
            "floor_p99_s": round(floors[int(0.99 * len(floors))], 4),
            "excess_p99_s": round(excess[int(0.99 * len(excess))], 4),
            "excess_mean_s": round(sum(excess) / len(excess), 5),
            "hit_rate": round(self.num_cached_tokens / self.num_prompt_tokens, 4),
            "of_oracle": round(self.num_cached_tokens / max(1, self.num_oracle_tokens), 4),
            "imbalance": round(max(self.busy_s) / mean, 3),
        }


class Simulation:
    """Workers, a router and sessions; `run` until the last answer."""

    def __init__(
        self,
        policy: str,
        *,
        num_prefills: int,
        num_decodes: int,
        speeds: Speeds,
        with_ids: bool = False,
    ) -> None:
        """``with_ids``: clients name their conversations."""
        self.now = 0.0
        self.outcome = Outcome()
        self._with_ids, self._speeds = with_ids, speeds
        self._happenings: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        clock = lambda: self.now  # noqa: E731
        self._pool, self._prefixes = PoolView(clock), Prefixes(clock)
        self._policy = PairingPolicy(policy, prefixes=self._prefixes)
        self._seen: set[bytes] = set()
        members = [_member(Role.PREFILL, number, speeds) for number in range(num_prefills)]
        members += [_member(Role.DECODE, number, speeds) for number in range(num_decodes)]
        self._pool.update(members)
        self._prefills: dict[WorkerKey, PrefillEngine] = {}
        self._decodes: dict[WorkerKey, DecodeEngine] = {}
        for member in members:
            self._prefixes.index.add(member.key)
            self._make(member, speeds)
        for decode in self._decodes.values():
            decode.waiters = list(self._prefills.values())

    def run(self, sessions: Sequence[Session]) -> Outcome:
        """Let all of it happen."""
        for session in sessions:
            self._after(session.start_s, _Course(self, session).ask)
        self._after(HEARTBEAT_S, self._beat)
        while self._happenings:
            self.now, _, happen = heapq.heappop(self._happenings)
            happen()
        for prefill in self._prefills.values():
            self.outcome.num_prompt_tokens += prefill.num_prompt_tokens
            self.outcome.num_cached_tokens += prefill.num_cached_tokens
            self.outcome.busy_s.append(prefill.busy_s)
        return self.outcome

    def submit(
        self, tokens: int, hashes: list[bytes], turn: Turn, then: Callable[[], None]
    ) -> None:
        """Pick a pair for a context and have it served; ``then`` its answer is whole."""
        num_oracle = 0
        for block_hash in hashes[: max_cached_blocks(tokens, BLOCK_SIZE)]:
            if block_hash not in self._seen:
                break
            num_oracle += BLOCK_SIZE
        self.outcome.num_oracle_tokens += num_oracle
        floor_s = self._speeds.steps.prefill_s(tokens - num_oracle)
        self._seen.update(hashes)
        shape = RequestShape(
            num_context_tokens=tokens,
            block_hashes=hashes,
            conversation=turn.session if self._with_ids else "",
        )
        pair = self._policy.pick(shape, self._pool)
        in_prefill, in_decode = ExitStack(), ExitStack()
        in_decode.enter_context(self._pool.in_flight(pair.decode.key))
        num_new = pair.num_new_tokens(tokens)
        in_prefill.enter_context(self._pool.in_flight(pair.prefill.key, num_new))
        arrived = self.now

        def on_first(job: Job) -> None:
            in_prefill.close()
            self.outcome.ttfts_s.append(self.now - arrived)
            self.outcome.floors_s.append(floor_s)

        def on_end(job: Job) -> None:
            in_decode.close()
            then()

        job = Job(
            hashes=hashes,
            num_tokens=tokens,
            num_output_tokens=turn.num_output_tokens,
            arrived_s=arrived,
            decode=self._decodes[pair.decode.key],
            on_first=on_first,
            on_end=on_end,
        )
        self._prefills[pair.prefill.key].add(job)

    def _beat(self) -> None:
        for engine in (*self._prefills.values(), *self._decodes.values()):
            engine.heartbeat()
        if self._happenings:
            self._after(HEARTBEAT_S, self._beat)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._happenings, (self.now + seconds, next(self._numbers), happen))

    def _make(self, member: Member, speeds: Speeds) -> None:
        is_prefill = member.role is Role.PREFILL
        kind = PrefillEngine if is_prefill else DecodeEngine
        engine: Engine = kind(
            member.key,
            speeds.prefill_blocks if is_prefill else speeds.decode_blocks,
            speeds,
            self._after,
            lambda: self.now,
            index=self._prefixes.index,
            report=self._pool.report,
        )
        if isinstance(engine, PrefillEngine):
            self._prefills[member.key] = engine
        elif isinstance(engine, DecodeEngine):
            self._decodes[member.key] = engine


class _Course:
    """One session under way."""

    def __init__(self, simulation: Simulation, session: Session) -> None:
        self._simulation, self._turns = simulation, iter(session.turns)
        self._context: list[int] = []
        self._hashes: list[bytes] = []

    def ask(self) -> None:
        """The next turn, if there is one."""
        turn = next(self._turns, None)
        if turn is not None:
            self._simulation._after(turn.pause_s, lambda: self._send(turn))

    def _send(self, turn: Turn) -> None:
        self._context += turn.new_tokens
        extend_hashes(self._hashes, self._context, BLOCK_SIZE)
        hashes, num_tokens = self._hashes[:], len(self._context)

        def then() -> None:
            self._context += [OUTPUT_TOKEN] * turn.num_output_tokens
            self.ask()

        self._simulation.submit(num_tokens, hashes, turn, then)


def _member(role: Role, number: int, speeds: Speeds) -> Member:
    return Member(
        key=WorkerKey(f"{role.value}-{number}", 1, 0),
        role=role,
        address=f"127.0.0.1:{number}",
        num_ranks=1,
        model="m",
        max_model_len=1 << 20,
        layout_fingerprint="l",
        transport="nixl",
        block_size=BLOCK_SIZE,
        max_num_requests=speeds.decode_requests if role is Role.DECODE else 0,
        kv_block_bytes=speeds.kv_token_bytes * BLOCK_SIZE,
    )
