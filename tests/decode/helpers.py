"""What several decode tests need: requests by size, a clock to turn by hand, a KV double."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decode.requests import Claim, ClaimUpdate, DecodeRequest, Writer
from engine.request import Request
from runtime.budget import Budget, BudgetKind
from runtime.sampling import SamplingParams

BLOCK_SIZE = 4
WRITER = Writer(instance="prefill-0", epoch=7, num_ranks=2, address="127.0.0.1:1")


class FakeClock:
    """Monotonic seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeKV:
    """Blocks of the pool as small values, with the copy interface of a KV pool."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks: list[object] = [None] * num_blocks

    def copy_out(self, block_ids: Sequence[int]) -> list[object]:
        return [self.blocks[block_id] for block_id in block_ids]

    def copy_in(self, block_ids: Sequence[int], blocks: list[object]) -> None:
        for block_id, content in zip(block_ids, blocks, strict=True):
            self.blocks[block_id] = content

    def is_done(self, blocks: list[object]) -> bool:
        return True

    def discard(self, blocks: list[object]) -> None:
        pass


class SlowKV(FakeKV):
    """Copies out read the blocks late, at `complete`: who reuses a block before spoils the copy."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._under_way: list[tuple[Sequence[int], list[object]]] = []

    def copy_out(self, block_ids: Sequence[int]) -> list[object]:
        copy: list[object] = []
        self._under_way.append((tuple(block_ids), copy))
        return copy

    def is_done(self, blocks: list[object]) -> bool:
        return all(copy is not blocks for _, copy in self._under_way)

    def complete(self) -> None:
        """All copies out are done now."""
        for block_ids, copy in self._under_way:
            copy += [self.blocks[block_id] for block_id in block_ids]
        self._under_way = []


def make_request(
    serial: int,
    num_prompt_tokens: int,
    *,
    max_tokens: int = 16,
    num_output: int = 0,
    router_id: str = "router-0",
) -> DecodeRequest:
    """A request in RESERVED whose tokens are its own; its nonce is 101 and its serial."""
    prompt = [serial * 1000 + index for index in range(num_prompt_tokens)]
    return DecodeRequest(
        request=Request(
            request_id=f"request-{serial}",
            prompt_token_ids=prompt,
            output_token_ids=[serial * 1000 + 900 + index for index in range(num_output)],
            sampling=SamplingParams(max_tokens=max_tokens),
        ),
        serial=serial,
        nonce=101 + serial,
        router_id=router_id,
        writer=WRITER,
        budget=Budget.start(BudgetKind.REQUEST, 1000.0, 1000.0),
    )


def claim_of(request: DecodeRequest, tell: Callable[[ClaimUpdate], None] = lambda _: None) -> Claim:
    """Its writer asks for the ticket."""
    writer = request.writer
    return Claim(nonce=request.nonce, writer_key=writer.key, num_ranks=writer.num_ranks, tell=tell)
