"""Requests as they come: conversations, shared prefixes, agents. Seeded; tokens are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

VOCABULARY = 100_000


@dataclass(slots=True, kw_only=True)
class Turn:
    """One request of a session, a while after the answer to the one before.

    Attributes:
        session: of which it is a turn; names the conversation.
        pause_s: from the answer before, or from the session's start.
        new_tokens: that follow the context of before, answer included.
        num_output_tokens: of the answer.
    """

    session: str
    pause_s: float
    new_tokens: list[int]
    num_output_tokens: int


@dataclass(slots=True, kw_only=True)
class Session:
    """Turns one after the other, from ``start_s`` on."""

    start_s: float
    turns: list[Turn] = field(default_factory=list)


def _draw(source: random.Random, number: int) -> list[int]:
    return source.choices(range(VOCABULARY), k=number)


def _starts(source: random.Random, per_s: float, seconds: float) -> Iterator[float]:
    now = source.expovariate(per_s)
    while now < seconds:
        yield now
        now += source.expovariate(per_s)


def conversations(seed: int, load: float, seconds: float) -> list[Session]:
    """People who talk: a system prompt that all share, then 2 to 10 turns, each a bit longer."""
    source = random.Random(seed)
    system = _draw(source, 640)
    sessions = []
    for number, start in enumerate(_starts(source, 22.0 * load, seconds)):
        session = Session(start_s=start)
        for turn in range(source.randint(2, 10)):
            first = [*system, *_draw(source, source.randint(500, 6000))]
            grown = _draw(source, source.randint(100, 1000))
            session.turns.append(
                Turn(
                    session=f"chat-{number}",
                    pause_s=source.expovariate(1 / 15.0) if turn else 0.0,
                    new_tokens=grown if turn else first,
                    num_output_tokens=source.randint(50, 400),
                )
            )
        sessions.append(session)
    return sessions


def shared_prefixes(seed: int, load: float, seconds: float) -> list[Session]:
    """Documents of 6,144 tokens, some asked about far more often, with 1,200 of a question."""
    source = random.Random(seed)
    documents = [_draw(source, 6144) for _ in range(300)]
    weights = [1.0 / (rank + 1) for rank in range(len(documents))]
    sessions = []
    for number, start in enumerate(_starts(source, 110.0 * load, seconds)):
        (document,) = source.choices(documents, weights)
        turn = Turn(
            session=f"question-{number}",
            pause_s=0.0,
            new_tokens=[*document, *_draw(source, source.randint(400, 2000))],
            num_output_tokens=source.randint(50, 300),
        )
        sessions.append(Session(start_s=start, turns=[turn]))
    return sessions


def agents(seed: int, load: float, seconds: float) -> list[Session]:
    """Tasks of one of 12 kinds: tools and rules of 8,192 tokens, then steps of what tools gave."""
    source = random.Random(seed)
    kinds = [_draw(source, 8192) for _ in range(12)]
    sessions = []
    for number, start in enumerate(_starts(source, 3.4 * load, seconds)):
        session, kind = Session(start_s=start), source.choice(kinds)
        for step in range(source.randint(8, 30)):
            grown = _draw(source, int(min(16_000, source.lognormvariate(7.0, 1.0))))
            session.turns.append(
                Turn(
                    session=f"task-{number}",
                    pause_s=source.expovariate(1 / 2.0) if step else 0.0,
                    new_tokens=grown if step else [*kind, *grown],
                    num_output_tokens=source.randint(30, 200),
                )
            )
        sessions.append(session)
    return sessions


TRACES: Mapping[str, Callable[[int, float, float], list[Session]]] = {
    "conversations": conversations,
    "shared-prefixes": shared_prefixes,
    "agents": agents,
}
"""By name; called with seed, load (1: as described) and seconds."""
