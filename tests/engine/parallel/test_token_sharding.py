"""Shares of rows, their padding, and packed rows that are sent from where they lie."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows, empty_packed, packed_bytes, packed_row_bytes
from engine.kernels.portable import portable_kernels
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, Ready, Then
from engine.parallel.token_sharding import ReplicatedTokens, ScatteredTokens
from tests.engine.formats.fp8 import quantize

KERNELS = portable_kernels(has_fp8=True)


class ScriptedGroup:
    """One rank of several: gathers are answered with what a test says the others sent."""

    def __init__(self, rank: int, size: int, gathered: Tensor | None = None) -> None:
        self.rank, self.size = rank, size
        self.gathered = gathered
        self.sent: list[Tensor] = []

    def start_all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        self.sent.append(tensor)
        assert self.gathered is not None
        return Ready(self.gathered)

    def start_reduce_scatter(self, tensor: Tensor) -> Pending[Tensor]:
        share = tensor.shape[0] // self.size
        return Ready(tensor[share * self.rank : share * (self.rank + 1)])


@given(num_tokens=st.integers(0, 20), size=st.integers(1, 8))
def test_shares_put_together_are_the_tokens(num_tokens: int, size: int) -> None:
    x = torch.randn(num_tokens, 3)
    shardings = [ScatteredTokens(ScriptedGroup(rank, size)) for rank in range(size)]
    shares = torch.cat([sharding.take(x) for sharding in shardings])
    assert shares.shape[0] % size == 0
    assert shares.shape[0] - num_tokens < size
    assert shares[:num_tokens].equal(x)
    assert not shares[num_tokens:].any()
    padded = shardings[0].pad(x)
    assert padded.equal(shares)
    assert shardings[0].pads(num_tokens) == (len(padded) > num_tokens)
    gathering = ScatteredTokens(ScriptedGroup(0, size, shares)).start_gather(shares, num_tokens)
    assert gathering.wait().equal(x)
    reduced = torch.cat([sharding.start_reduce(padded).wait() for sharding in shardings])
    assert reduced.equal(shares)


@given(num_tokens=st.integers(1, 20), size=st.integers(1, 8), data=st.data())
def test_rows_that_are_no_padding_are_counted_by_rank(
    num_tokens: int, size: int, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(0, num_tokens))
    is_real = torch.arange(num_tokens) < num_rows
    for rank in range(size):
        sharding = ScatteredTokens(ScriptedGroup(rank, size))
        own = sharding.take(is_real)
        count = sharding.count(torch.tensor([num_rows]), num_tokens)
        assert count is not None
        assert own.tolist() == [row < int(count) for row in range(len(own))]


@given(num_tokens=st.integers(0, 40), size=st.integers(1, 8))
def test_the_host_knows_which_rows_fill_up_the_shares(num_tokens: int, size: int) -> None:
    for rank in range(size):
        sharding = ScatteredTokens(ScriptedGroup(rank, size))
        own = sharding.take(torch.ones(num_tokens, dtype=torch.bool))
        count = sharding.count(None, num_tokens)
        assert not isinstance(count, Tensor)
        assert (count is None) == own.all()
        assert own.sum() == (len(own) if count is None else count)
    assert ReplicatedTokens(RankGroup()).count(None, num_tokens) is None


def test_one_rank_keeps_what_it_has() -> None:
    x = torch.randn(5, 3)
    for sharding in (ReplicatedTokens(RankGroup()), ScatteredTokens(RankGroup())):
        assert sharding.take(x).equal(x)
        assert sharding.pad(x) is x
        assert sharding.start_gather(x, 5).wait().equal(x)
        assert sharding.start_gather_padded(x).wait() is x
        assert sharding.start_reduce(x).wait() is x
        count = sharding.count(torch.tensor([3]), 5)
        assert count is not None
        assert count.tolist() == [3]


@given(num_rows=st.integers(0, 5), num_groups=st.integers(1, 7))
def test_packed_rows_keep_every_bit(num_rows: int, num_groups: int) -> None:
    size = 128 * num_groups
    x = torch.randn(num_rows, size)
    rows = quantize(KERNELS, x)
    packed = packed_bytes(rows)
    assert packed.shape == (num_rows, packed_row_bytes(size))
    back = Fp8Rows.packed(packed, size)
    assert back.data_TK.float().equal(rows.data_TK.float())
    assert back.scale_TG.equal(rows.scale_TG)


def test_rows_that_are_packed_are_not_copied() -> None:
    out = empty_packed(3, 256, torch.device("cpu"))
    rows = quantize(KERNELS, torch.randn(3, 256), out)
    assert packed_bytes(rows).data_ptr() == out.data_TK.data_ptr()
    # Rows in the middle of a packed buffer too.
    part = Fp8Rows(data_TK=rows.data_TK[1:], scale_TG=rows.scale_TG[1:])
    assert packed_bytes(part).data_ptr() == part.data_TK.data_ptr()
    assert Fp8Rows.packed(packed_bytes(part), 256).dequantize().equal(rows.dequantize()[1:])


def test_fp8_rows_are_gathered_as_bytes() -> None:
    mine, other = (quantize(KERNELS, torch.randn(2, 128)) for _ in range(2))
    group = ScriptedGroup(0, 2, torch.cat((packed_bytes(mine), packed_bytes(other))))
    gathered = ScatteredTokens(group).start_gather_padded(mine).wait()
    assert isinstance(gathered, Fp8Rows)
    assert Fp8Rows.packed(group.sent[0], 128).dequantize().equal(mine.dequantize())
    both = torch.cat((mine.dequantize(), other.dequantize()))
    assert gathered.dequantize().equal(both)
    assert gathered.column_major().dequantize().equal(both)


def test_a_function_is_applied_on_arrival() -> None:
    calls: list[int] = []
    pending = Then(Ready(3), lambda value: calls.append(value) or value + 1)
    assert not calls
    assert pending.wait() == 4
    assert calls == [3]
