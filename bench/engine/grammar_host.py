"""What grammars cost the host: a step of decode with one a row, and the first token of a request.

Run ``python -m bench.engine.grammar_host``; prints one JSON object. The model is left out: tokens
are drawn among those that a mask leaves, and a string ends after nine of them about. The vocabulary
is the bundled model's, widened to ``--vocab-size`` by pairs of its pieces. Every row has a schema
of its own, or all have the one of ``--schema``, in the grammar that a router makes of it. The parts
of a step, in milliseconds, medians; a GPU runs the model of the step meanwhile:

- take: the matchers are told the tokens of the step before; CPU time of the thread.
- fill: the masks of this step, where the copy to the device begins; by the clock.
- fill_cpu: the same in CPU time of all threads.

And of a request: `compile` the first time that its schema comes, on a thread of its own (by the
clock), and `begin` whenever it is kept, which is all that its first token waits for.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine.machine import describe_machine
from bench.engine.schemas import STOP, choose_token, draw_schema, widened
from deploy.checkpoint.model_folder import BUNDLED_MODEL
from engine.host_copy import host_tensor
from grammar.compile_process import grammar_of
from grammar.constraints import Compiler, Constraints
from grammar.matcher import Matcher, fill_masks, num_mask_words
from grammar.schemas.schema import canonical
from grammar.vocabulary import read_vocabulary
from runtime.sampling import OutputConstraint, SamplingParams


@dataclass
class GrammarHost:
    """Rows in the middle of their outputs, and the seconds that each part took."""

    num_rows: int
    num_fields: int
    vocab_size: int
    constraint: OutputConstraint | None = None
    """Of every row; None: each has one of its own, of ``num_fields``."""
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.draw = random.Random(0)
        self.constraints = Constraints(
            BUNDLED_MODEL, self.vocab_size, open_compiler=lambda *_: self._open()
        )
        self.params = [self._params(row) for row in range(self.num_rows)]
        self.rows = [self._begin(params, "compile") for params in self.params]
        self.rows = [self._begin(params, "begin") for params in self.params]

    @contextmanager
    def timed(self, part: str, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        """Add what is done within to a part."""
        start = clock()
        yield
        self.seconds[part].append(clock() - start)

    def step(self) -> None:
        """Masks, and a token for every row; who is over begins anew."""
        shape = (self.num_rows, num_mask_words(self.vocab_size))
        with self.timed("fill", time.perf_counter), self.timed("fill_cpu", time.process_time):
            words = host_tensor(shape, torch.int32, torch.device("cpu")).numpy()
            fill_masks(self.rows, words)
        tokens = [self._choose(words[row]) for row in range(self.num_rows)]
        with self.timed("take"):
            for matcher, token_id in zip(self.rows, tokens, strict=True):
                matcher.take(matcher.num_taken, token_id)
        for row, matcher in enumerate(self.rows):
            assert matcher.error is None, matcher.error
            if matcher.is_over:
                self.rows[row] = self._begin(self.params[row], "begin")

    def report(self) -> dict[str, float]:
        """Milliseconds, medians, and the slowest of those that vary."""
        found = {part: 1e3 * statistics.median(times) for part, times in self.seconds.items()}
        found |= {f"{part}_most": 1e3 * max(self.seconds[part]) for part in ("fill", "compile")}
        return {name: round(value, 3) for name, value in found.items()}

    def _begin(self, params: SamplingParams, part: str) -> Matcher:
        with self.timed(part, time.perf_counter):
            matcher = self.constraints.begin(params).result()
        assert isinstance(matcher, Matcher)
        return matcher

    def _params(self, row: int) -> SamplingParams:
        constraint = self.constraint or draw_schema(row, self.num_fields, self.draw)
        return SamplingParams(stop_token_ids=(STOP,), constraint=constraint)

    def _choose(self, words: np.ndarray[Any, np.dtype[np.int32]]) -> int:
        return choose_token(words, self.vocab_size, self.quote, self.draw)

    def _open(self) -> Compiler:
        from grammar.grammars import Grammars  # late: it brings xgrammar

        vocabulary = widened(read_vocabulary(Path(BUNDLED_MODEL), self.vocab_size), self.draw)
        self.quote = vocabulary.pieces.index('"')
        with self.timed("vocabulary", time.perf_counter):
            return Grammars(vocabulary)


def _constraint_of(schema: object) -> OutputConstraint:
    body = {"json_schema": canonical(schema).schema, "is_compact": True}
    return OutputConstraint(grammar=grammar_of({"type": "json_schema", **body}))


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="requests of a step")
    parser.add_argument("--fields", type=int, default=12, help="of every schema")
    parser.add_argument("--schema", type=Path, help="a file with the JSON schema of every row")
    parser.add_argument("--vocab-size", type=int, default=129280)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    schema = constraint = None
    if args.schema is not None:
        schema = json.loads(args.schema.read_text(encoding="utf-8"))
        constraint = _constraint_of(schema)
    host = GrammarHost(args.rows, args.fields, args.vocab_size, constraint)
    for _ in range(args.steps):
        host.step()
    host.constraints.close()
    print(
        json.dumps(
            {
                "arguments": {**vars(args), "schema": schema},
                "machine": describe_machine("cpu", 1),
                "ms": host.report(),
            }
        )
    )


if __name__ == "__main__":
    main()
