"""Tries a grammar out: walks of random tokens that it takes, and what finding the next ones costs.

A grammar that reads a text in more and more ways compiles in milliseconds, and costs more with
every token. Here it is refused before it reaches a worker, with what was measured; what no walk
finds, the worker's guard ends (``engine.constraint.guard``).

A walk may come to a token that costs minutes, in a call that cannot be interrupted: a fork walks,
whose CPU the kernel limits, and which says how far it came.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import struct
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from engine.constraint.grammars import CompiledGrammar
from engine.constraint.matcher import num_mask_words

NUM_TOKENS: Final = 256
"""Of a walk."""
NUM_SEEDS: Final = 3
MASK_CPU_S: Final = 0.05
"""That one mask may take where it takes more than those of the first tokens: most take a
thousandth of it, on any vocabulary."""
GROWTH: Final = 4
"""By which late masks may cost more than early ones."""
ENOUGH_CPU_S: Final = 0.25
"""After which a walk that has shown nothing is over."""
WALK_CPU_S: Final = 0.75
"""After which any walk is over."""
MOST_CPU_S: Final = 0.5
"""That one mask may take at all."""
_WINDOW: Final = 8
"""Masks that are compared."""
_COST = struct.Struct("<d")


def try_out(grammar: CompiledGrammar, vocab_size: int) -> str:
    """What is wrong with a grammar; "": nothing that was found."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # Its signal is to end: a mask that takes too long, and no number of others.
            signal.setitimer(signal.ITIMER_PROF, NUM_SEEDS * WALK_CPU_S + 2 * MOST_CPU_S)
            _walk_all(grammar, vocab_size, lambda cost: os.write(writing, _COST.pack(cost)))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        costs = [cost for (cost,) in _COST.iter_unpack(pipe.read())]
    _, status = os.waitpid(child, 0)
    for index, cost in enumerate(costs):
        if cost > MOST_CPU_S:
            return _told(index, f"takes {cost:.1f} s of CPU")
        if index >= _WINDOW and _is_grown(costs, costs[index - _WINDOW : index]):
            return _told(index, f"takes {cost * 1000:.0f} ms of CPU")
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status):
        return _told(len(costs), f"takes more than {MOST_CPU_S:g} s of CPU, or too much memory")
    return ""


def _is_grown(costs: list[float], late: list[float]) -> bool:
    middle = statistics.median(late)
    return middle > MASK_CPU_S and middle > GROWTH * statistics.median(costs[:_WINDOW])


def _told(num_masks: int, cost: str) -> str:
    return (
        f"is too ambiguous: after {num_masks} tokens of a try, finding what may come next {cost}. "
        "Fix: write it so that a text can be read in one way, without repeats within repeats"
    )


def _walk_all(grammar: CompiledGrammar, vocab_size: int, tell: Callable[[float], object]) -> None:
    """Walk along random tokens, along one that is repeated, and along both."""
    for seed in range(NUM_SEEDS):
        _walk(grammar, vocab_size, random.Random(seed), (0.0, 1.0, 0.5)[seed % 3], tell)


def _walk(
    grammar: CompiledGrammar,
    vocab_size: int,
    rng: random.Random,
    again: float,
    tell: Callable[[float], object],
) -> None:
    """``again``: how likely the token before is taken again, where it may come."""
    words = np.zeros((1, num_mask_words(vocab_size)), dtype=np.int32)
    state, token, spent = grammar.begin(), -1, 0.0
    for _ in range(NUM_TOKENS):
        begun = time.process_time()
        state.fill_rows([state], words, [0])
        cost = time.process_time() - begun
        tell(cost)
        spent += cost
        if spent > WALK_CPU_S or (spent > ENOUGH_CPU_S and cost < MASK_CPU_S / GROWTH):
            return
        legal = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(legal):
            return
        if token not in legal or rng.random() >= again:
            token = int(legal[rng.randrange(len(legal))])
        state.accept(token)
