"""Tries a grammar out: walks of random tokens that it takes, and what finding the next ones costs.

A grammar that reads a text in more and more ways compiles in milliseconds, and costs more with
every token. Here it is refused before it reaches a worker, with what was measured; what no walk
finds, the worker's guard ends (``grammar.guard``).

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
from typing import Final, NoReturn

import numpy as np

from grammar.grammars import CompiledGrammar
from grammar.guard import MASK_CPU_S
from grammar.matcher import num_mask_words

NUM_TOKENS: Final = 256
"""Of a walk."""
NUM_WALKS: Final = 3
ENOUGH_CPU_S: Final = 0.25
"""After which a walk that has shown nothing is over."""
WALK_CPU_S: Final = 0.75
"""After which any walk is over."""
MOST_CPU_S: Final = 0.5
"""That one mask may take at all; most take a ten-thousandth, on any vocabulary."""
MANY_CPU_S: Final = 2 * MASK_CPU_S
"""That one after another may take: the worker's guard lasts for a few of these."""
NOTED_CPU_S: Final = 0.02
"""That masks may take which cost more and more."""
RISE: Final = 1.25
"""By which a few masks cost more than the few before them, where they do."""
_WINDOW: Final = 5
_COST = struct.Struct("<d")


def try_out(grammar: CompiledGrammar, vocab_size: int) -> str:
    """What is wrong with a grammar; "": nothing that was found."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_tried(grammar, vocab_size, writing)
    os.close(writing)
    costs: list[float] = []
    problem = ""
    with os.fdopen(reading, "rb") as pipe:
        while not problem and len(read := pipe.read(_COST.size)) == _COST.size:
            costs += _COST.unpack(read)
            problem = _problem(costs)
    if problem:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not problem and status:
        problem = _told(len(costs), f"more than {MOST_CPU_S:g} s of CPU, or too much memory")
    return problem


def _problem(costs: list[float]) -> str:
    if costs[-1] > MOST_CPU_S:
        return _told(len(costs), f"{costs[-1]:.1f} s of CPU")
    if len(costs) < 3 * _WINDOW:
        return ""
    first, second, third = (
        statistics.median(costs[len(costs) - back * _WINDOW :][:_WINDOW]) for back in (3, 2, 1)
    )
    is_rising = third > NOTED_CPU_S and third > RISE * second and second > RISE * first
    if third > MANY_CPU_S or is_rising:
        return _told(len(costs), f"{third * 1000:.0f} ms of CPU")
    return ""


def _be_tried(grammar: CompiledGrammar, vocab_size: int, writing: int) -> NoReturn:
    """Walk, and end."""
    status = 1
    try:
        # Its signal is to end: a mask that takes too long, and no number of others.
        signal.setitimer(signal.ITIMER_PROF, NUM_WALKS * WALK_CPU_S + 2 * MOST_CPU_S)
        for seed in range(NUM_WALKS):
            again = seed / (NUM_WALKS - 1)
            _walk(
                grammar,
                vocab_size,
                random.Random(seed),
                again,
                lambda cost: os.write(writing, _COST.pack(cost)),
            )
        status = 0
    finally:
        os._exit(status)


def _told(num_masks: int, cost: str) -> str:
    return (
        f"is too ambiguous: after {num_masks} tokens of a try, finding what may come next takes "
        f"{cost}. Fix: write it so that a text can be read in one way, without repeats within "
        "repeats"
    )


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
        if spent > WALK_CPU_S or (spent > ENOUGH_CPU_S and cost < NOTED_CPU_S / 2):
            return
        legal = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(legal):
            return
        if token not in legal or rng.random() >= again:
            token = int(legal[rng.randrange(len(legal))])
        state.accept(token)
