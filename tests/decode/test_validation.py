"""What comes from elsewhere is refused by its form, before the engine loop hears of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from decode import validation
from decode.places import Places
from decode.validation import RankFacts, Validation
from engine.request import Request
from kv_transfer.metadata import SlotLayout
from runtime.budget import BudgetKind
from runtime.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    OutOfBlocksError,
    OverloadedError,
    StaleTicketError,
    TandemError,
)
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.wire import identity, own_wire, sampling_to_proto
from runtime.sampling import SamplingParams
from runtime.version import WIRE
from tests.decode.imagined import BLOCK_SIZE, LAYOUT, VOCAB_SIZE

SLOTS = SlotLayout()


def no_endpoint(_: common_pb2.WorkerIdentity) -> decode_pb2.PeerEndpoint:
    raise NotImplementedError


FACTS = RankFacts(
    identity=identity("decode-0", 77, 1),
    address="127.0.0.1:1",
    transport="loopback",
    layout=LAYOUT,
    slots=SLOTS,
    vocab_size=VOCAB_SIZE,
    max_model_len=100,
    num_usable_blocks=16,
    endpoint=no_endpoint,
)


def reserve(**changes: Any) -> decode_pb2.ReserveRequest:
    values: dict[str, Any] = {
        "request_id": "a",
        "router_id": "router-0",
        "context_token_ids": [5, 6, 7, 8, 9],
        "num_output_tokens": 2,
        "sampling": sampling_to_proto(SamplingParams(max_tokens=8)),
        "timeout_s": 30.0,
        "prefill": identity("prefill-0", 7),
        "prefill_address": "127.0.0.1:2",
        "num_prefill_ranks": 2,
    }
    return decode_pb2.ReserveRequest(**{**values, **changes})


def claim(**changes: Any) -> decode_pb2.ClaimRequest:
    values: dict[str, Any] = {
        "nonce": 5,
        "decode": FACTS.identity,
        "prefill": identity("prefill-0", 7),
        "num_prefill_ranks": 2,
        "transport": "loopback",
        "layout_fingerprint": LAYOUT.fingerprint(),
        "layout_description": LAYOUT.describe(),
        "metadata_slot_bytes": SLOTS.slot_bytes,
        "wire": own_wire(),
    }
    return decode_pb2.ClaimRequest(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_prefill_ranks": 0}, InvalidRequestError, "num_prefill_ranks is 0"),
        ({"num_prefill_ranks": 65}, InvalidRequestError, "1 to 64 parts"),
        ({"request_id": ""}, InvalidRequestError, "request_id is empty"),
        ({"router_id": ""}, InvalidRequestError, "router_id is empty"),
        ({"prefill": None}, InvalidRequestError, "prefill.instance, prefill.epoch is empty"),
        ({"prefill_address": ""}, InvalidRequestError, "prefill_address is empty"),
        ({"timeout_s": 0.0}, InvalidRequestError, "timeout_s is 0.0"),
        ({"timeout_s": float("nan")}, InvalidRequestError, "timeout_s is nan"),
        ({"timeout_s": float("inf")}, InvalidRequestError, "timeout_s is inf"),
        ({"context_token_ids": []}, InvalidRequestError, "no prompt"),
        ({"num_output_tokens": 5}, InvalidRequestError, "no prompt"),
        (
            {"sampling": sampling_to_proto(SamplingParams(max_tokens=2))},
            InvalidRequestError,
            "max_tokens is 2, and 2 output tokens are there",
        ),
        ({"context_token_ids": [5] * 100}, InvalidRequestError, "shorten it to at most 99"),
        ({"context_token_ids": [5] * 64}, OutOfBlocksError, "needs 17 KV blocks"),
    ],
)
def test_a_malformed_reservation_takes_no_place(
    changes: dict[str, Any], error: type[TandemError], words: str
) -> None:
    places = Places(4)
    with pytest.raises(error, match=words):
        Validation(FACTS, places).take_place(reserve(**changes))
    assert len(places) == 0


def test_places_are_limited_and_an_id_has_one() -> None:
    places = Places(2)
    checked = Validation(FACTS, places)
    checked.take_place(reserve())
    with pytest.raises(InvalidRequestError, match="request id a is in use"):
        checked.take_place(reserve())
    checked.take_place(reserve(request_id="b"))
    with pytest.raises(OverloadedError, match=r"decode\.max_num_reserved"):
        checked.take_place(reserve(request_id="c"))
    places.give_back("a")
    checked.take_place(reserve(request_id="c"))


async def test_a_context_is_prompt_and_output_so_far() -> None:
    made = await Validation(FACTS, Places(4)).make_request(reserve(row_id=12))
    assert made.row_id == 12
    assert made.request.prompt_token_ids == [5, 6, 7]
    assert made.request.output_token_ids == [8, 9]
    assert (made.request.num_context_tokens, made.first_index) == (5, 2)
    assert made.budget.kind is BudgetKind.REQUEST
    assert made.nonce != 0
    with pytest.raises(InvalidRequestError, match="token id 1000"):
        await Validation(FACTS, Places(4)).make_request(reserve(context_token_ids=[5, 6, 1000]))


async def test_nonces_are_random() -> None:
    checked = Validation(FACTS, Places(4))
    nonces = {(await checked.make_request(reserve())).nonce for _ in range(50)}
    assert len(nonces) == 50
    assert max(nonces) > 2**56


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_context_is_hashed_before_the_engine_loop_has_it(
    monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """And off the event loop where it is long."""
    threads: list[threading.Thread] = []
    hash_all = Request.update_block_hashes

    def watched(self: Request, block_size: int) -> object:
        threads.append(threading.current_thread())
        return hash_all(self, block_size)

    monkeypatch.setattr(Request, "update_block_hashes", watched)
    if is_long:
        monkeypatch.setattr(validation, "LONG_CONTEXT", 5)
    made = await Validation(FACTS, Places(4)).make_request(reserve())
    assert len(made.request.block_hashes) == 5 // BLOCK_SIZE
    (thread,) = threads
    assert (thread is threading.main_thread()) is not is_long


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"decode": identity("decode-0", 76, 1)}, StaleTicketError, "another life"),
        ({"decode": identity("decode-0", 77, 0)}, StaleTicketError, "this is decode-0 rank 1"),
        ({"transport": "nixl"}, InvalidRequestError, "ours 'loopback', theirs 'nixl'"),
        ({"layout_fingerprint": "x"}, LayoutMismatchError, "KV layouts differ"),
        ({"metadata_slot_bytes": 64}, LayoutMismatchError, "theirs 64"),
    ],
)
def test_who_stores_kv_otherwise_may_not_claim(
    changes: dict[str, Any], error: type[TandemError], words: str
) -> None:
    checked = Validation(FACTS, Places(4))
    assert checked.make_claim(claim(), lambda _: None).writer_key == "prefill-0@0000000000000007/0"
    with pytest.raises(error, match=words):
        checked.make_claim(claim(**changes), lambda _: None)


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (common_pb2.Wire(number=WIRE + 1, version="9.9"), f"wire {WIRE + 1} (Tandem 9.9)"),
        (None, "wire 0 (Tandem of an unknown version)"),
    ],
)
def test_a_writer_that_speaks_something_else_gets_no_ticket(
    wire: common_pb2.Wire | None, said: str
) -> None:
    with pytest.raises(LayoutMismatchError) as raised:
        Validation(FACTS, Places(4)).make_claim(claim(wire=wire), lambda _: None)
    assert f"prefill worker prefill-0/0 speaks {said}, this process wire {WIRE} " in str(
        raised.value
    )
    assert "Fix: one version of Tandem on both" in str(raised.value)
