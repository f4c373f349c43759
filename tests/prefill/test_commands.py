"""The command stream gives back what was put in, however it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.commands import (
    AbandonTicket,
    CommandStream,
    FinishTicket,
    OpenTicket,
    PushBlocks,
    SenderCommand,
    encode_command,
)
from runtime.errors import InternalError

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
IDS = st.lists(U32, max_size=20).map(tuple)

opens = st.builds(
    OpenTicket,
    st.builds(
        SendTicket,
        request_id=st.text(max_size=12),
        nonce=U64,
        epoch=U64,
        block_ids=IDS,
        slot=U32,
        timeout_s=st.floats(0, 1e6),
        fence_generation=U64,
    ),
    st.builds(
        PeerEndpoint,
        peer=st.text(max_size=12),
        endpoint=st.binary(max_size=40),
        kv_region_bytes=U64,
        metadata_region_bytes=U64,
        fence_generation=U64,
    ),
)
commands = st.one_of(
    opens,
    st.builds(PushBlocks, U64, U32, IDS),
    st.builds(FinishTicket, U64),
    st.builds(AbandonTicket, U64),
)


@given(st.lists(commands, max_size=8), st.integers(1, 64))
def test_commands_survive_being_cut_into_pieces(
    sent: list[SenderCommand], piece_bytes: int
) -> None:
    data = b"".join(encode_command(command) for command in sent)
    stream = CommandStream()
    got: list[SenderCommand] = []
    for start in range(0, len(data), piece_bytes):
        got += stream.feed(data[start : start + piece_bytes])
    assert got == sent


def test_an_unknown_frame_is_an_error() -> None:
    with pytest.raises(InternalError, match="type 9"):
        CommandStream().feed(b"\x00\x00\x00\x00\x09")
