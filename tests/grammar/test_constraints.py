"""Compiling beside everything else: who waits, what is kept, and what is refused by name."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from grammar.constraints import (
    MAX_GRAMMAR_BYTES,
    MAX_TOKENS_AT_ONCE,
    NUM_THREADS,
    Constraints,
)
from runtime.errors import DrainingError, InternalError, InvalidRequestError
from runtime.sampling import OutputConstraint, SamplingParams
from tests.grammar.fakes import VOCAB, CompiledList, FakeCompiler, ListedGrammar

TIMEOUT_S = 60


def ask(grammar: str = "", **constraint: object) -> SamplingParams:
    return SamplingParams(constraint=OutputConstraint(grammar=grammar, **constraint))  # type: ignore[arg-type]


def make(compiler: FakeCompiler, cache_bytes: int = 100) -> Constraints:
    return Constraints(
        "/nonexistent", VOCAB, cache_bytes=cache_bytes, open_compiler=lambda *_: compiler
    )


def test_a_request_without_a_constraint_has_no_matcher_and_starts_nothing() -> None:
    constraints = Constraints("/nonexistent", VOCAB)
    assert constraints.begin(SamplingParams()).result(0) is None


def test_a_budget_alone_needs_no_tokenizer() -> None:
    constraints = Constraints("/nonexistent", VOCAB)
    params = ask(starts_after=(5,), max_tokens_before=2)
    matcher = constraints.begin(params, [7, 7]).result(0)
    assert matcher is not None
    assert matcher.is_binding


def test_what_is_warmed_is_opened_once_and_before_a_request() -> None:
    opened: list[int] = []

    def open_compiler(folder: Path, vocab_size: int) -> FakeCompiler:
        opened.append(vocab_size)
        return FakeCompiler()

    constraints = Constraints("/nonexistent", VOCAB, open_compiler=open_compiler)
    assert not opened
    constraints.warm()
    assert opened == [VOCAB]
    constraints.begin(ask("3 4")).result(TIMEOUT_S)
    assert opened == [VOCAB]
    constraints.close()


def test_a_model_without_a_tokenizer_is_warmed_and_serves_what_needs_none(tmp_path: Path) -> None:
    constraints = Constraints(tmp_path, VOCAB)
    constraints.warm()
    assert constraints.begin(SamplingParams()).result(0) is None
    with pytest.raises(InvalidRequestError):
        constraints.begin(ask("1 2")).result(TIMEOUT_S)
    constraints.close()


def test_others_do_not_wait_for_a_grammar_that_takes_long() -> None:
    compiler = FakeCompiler()
    constraints = make(compiler)
    slow = constraints.begin(ask("slow 1 2"))
    quick = constraints.begin(ask("3 4")).result(TIMEOUT_S)
    assert quick is not None
    assert not slow.done()
    compiler.may_end.set()
    assert slow.result(TIMEOUT_S) is not None
    constraints.close()


def test_a_grammar_is_compiled_once_for_all_who_ask() -> None:
    compiler = FakeCompiler()
    constraints = make(compiler)
    making = [constraints.begin(ask("slow 1 2")) for _ in range(3)]
    compiler.may_end.set()
    matchers = [future.result(TIMEOUT_S) for future in making]
    assert compiler.compiled == ["slow 1 2"]
    assert len({id(matcher) for matcher in matchers}) == 3
    constraints.begin(ask("slow 1 2")).result(0)  # at once
    constraints.close()


def test_the_least_recently_used_go_first_where_the_kept_are_too_large() -> None:
    compiler = FakeCompiler(num_bytes=40)
    constraints = make(compiler, cache_bytes=100)  # with their texts two fit
    for text in ("1", "2", "1", "3", "1", "2"):
        constraints.begin(ask(text)).result(TIMEOUT_S)
    assert compiler.compiled == ["1", "2", "3", "2"]
    assert constraints.num_cached_bytes == 82
    constraints.close()


def test_a_grammar_larger_than_all_that_may_be_kept_serves_its_own_request() -> None:
    constraints = make(FakeCompiler(num_bytes=1000))
    assert constraints.begin(ask("1")).result(TIMEOUT_S) is not None
    constraints.close()


def test_what_cannot_be_compiled_is_refused_and_not_kept() -> None:
    compiler = FakeCompiler()
    constraints = make(compiler)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="it is bad"):
            constraints.begin(ask("bad")).result(TIMEOUT_S)
    assert compiler.compiled == ["bad", "bad"]
    constraints.close()


def test_a_compiler_that_fails_is_our_fault() -> None:
    class Broken:
        def compile(self, text: str) -> CompiledList:
            raise ZeroDivisionError("oops")

    constraints = Constraints("/nonexistent", VOCAB, open_compiler=lambda *_: Broken())
    with pytest.raises(InternalError, match="oops"):
        constraints.begin(ask("1")).result(TIMEOUT_S)
    constraints.close()


def test_who_stops_waiting_does_not_end_what_is_made() -> None:
    compiler = FakeCompiler()
    constraints = make(compiler)
    made = constraints.begin(ask("slow 1 2"))
    assert not made.cancel()
    compiler.may_end.set()
    assert made.result(TIMEOUT_S) is not None
    constraints.close()


def test_a_long_output_is_told_to_its_matcher_on_another_thread() -> None:
    """Who asks may be an event loop; and those that come later are not earlier."""
    compiler = FakeCompiler()
    constraints = make(compiler, cache_bytes=10**6)
    tokens = [1] * (MAX_TOKENS_AT_ONCE + 1)
    text = " ".join(map(str, [*tokens, 2]))
    constraints.begin(ask(text)).result()  # from now on it is kept
    told_on: list[str] = []
    taken = ListedGrammar.accept

    def accept(state: ListedGrammar, token_id: int) -> bool:
        told_on.append(threading.current_thread().name)
        return taken(state, token_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ListedGrammar, "accept", accept)
        ended: list[int] = []
        making = [constraints.begin(ask(text), tokens[:count]) for count in (33, 33, 3)]
        for number, future in enumerate(making[:2]):
            future.add_done_callback(lambda _, number=number: ended.append(number))
        matchers = [future.result() for future in making]
    constraints.close()
    assert [matcher.num_taken for matcher in matchers if matcher] == [33, 33, 3]
    assert ended == [0, 1]
    here = threading.current_thread().name
    assert told_on.count(here) == 3, "a few tokens are told at once"
    assert len(told_on) == 33 + 33 + 3


def test_a_long_output_at_the_end_is_told_that_the_worker_ends() -> None:
    constraints = make(FakeCompiler(), cache_bytes=10**6)
    tokens = [1] * (MAX_TOKENS_AT_ONCE + 1)
    text = " ".join(map(str, [*tokens, 2]))
    constraints.begin(ask(text)).result()
    constraints.close()
    with pytest.raises(DrainingError, match="the worker ends"):
        constraints.begin(ask(text), tokens).result()


def test_who_waits_at_the_end_is_told_of_it_and_so_is_who_comes_later() -> None:
    compiler = FakeCompiler()
    constraints = make(compiler)
    begun = [constraints.begin(ask(f"slow {number}")) for number in range(NUM_THREADS)]
    queued = constraints.begin(ask("3 4"))
    constraints.close()
    late = constraints.begin(ask("5 6"))
    for future in (queued, late):
        with pytest.raises(DrainingError):
            future.result(TIMEOUT_S)
    compiler.may_end.set()
    assert all(future.result(TIMEOUT_S) is not None for future in begun)


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    constraints = Constraints(tmp_path, VOCAB)
    with pytest.raises(InvalidRequestError, match=r"holds no tokenizer\.json") as caught:
        constraints.begin(ask("{}")).result(TIMEOUT_S)
    assert str(tmp_path) in caught.value.message
    constraints.close()


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    constraints = Constraints(tmp_path, VOCAB)
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json cannot be read \(KeyError"):
        constraints.begin(ask("{}")).result(TIMEOUT_S)
    constraints.close()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (ask("1", starts_after=(VOCAB,)), "constraint.starts_after"),
        (ask("1", max_tokens_before=3), "constraint.max_tokens_before"),
        (ask("1" * (MAX_GRAMMAR_BYTES + 1)), "constraint.grammar"),
    ],
)
def test_a_field_that_cannot_be_is_named(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(FakeCompiler()).begin(params)
    assert caught.value.message.startswith(field)


@pytest.mark.slow
def test_nothing_of_xgrammar_is_imported_before_a_grammar_comes() -> None:
    code = (
        "import sys, decode.worker, prefill.worker;"
        "from grammar.constraints import Constraints;"
        "from runtime.sampling import SamplingParams;"
        "Constraints('/nonexistent', 70).begin(SamplingParams()).result();"
        "assert not {'xgrammar', 'transformers'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
