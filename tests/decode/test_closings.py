"""What prefill says of the end of its parts."""

from __future__ import annotations

import pytest

from decode.closings import read_closings
from runtime.errors import DrainingError, OverloadedError, TandemError
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.wire import error_to_proto

PREFILL = common_pb2.WorkerIdentity(instance="prefill-0", epoch=5, rank=0)


@pytest.mark.parametrize(
    ("error", "speaker"),
    [(DrainingError("ended"), "prefill-0/0"), (OverloadedError("x", relayed_from="y/1"), "y/1")],
)
def test_why_a_part_failed_is_the_word_of_its_writer(error: TandemError, speaker: str) -> None:
    """Of its first rank, by whose name routers know all."""
    part = decode_pb2.PartClosure(
        rank=1, outcome=decode_pb2.TICKET_OUTCOME_FAILED, error=error_to_proto(error)
    )
    closure = decode_pb2.TicketClosure(request_id="r", nonce=1, parts=[part])
    message = decode_pb2.CloseTicketsRequest(prefill=PREFILL, decode_epoch=7, closures=[closure])
    (closing,) = read_closings(message)
    assert closing.parts[0].peer == "prefill-0/1"
    failure = closing.parts[0].failure
    assert (type(failure), failure.relayed_from) == (type(error), speaker)
