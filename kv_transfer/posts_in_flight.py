"""The posts of a sender lane that are not over, and whose bytes they carry. Belongs to the lane's
thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kv_transfer.metadata import encode_slot_notices
from kv_transfer.peer_link import PeerLink
from kv_transfer.post_builder import PostDraft, PostShare
from kv_transfer.transport import TransferHandle, TransferState, Transport
from runtime.errors import InternalError, TandemError
from runtime.logging import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Post:
    link: PeerLink
    handle: TransferHandle
    shares: list[PostShare]


class PostsInFlight:
    """Posts drafts, polls them, and tells their tickets how they ended."""

    def __init__(self, transport: Transport) -> None:
        self.num_bytes = 0
        self._transport = transport
        self._posts: list[_Post] = []

    def __len__(self) -> int:
        return len(self._posts)

    def post(self, link: PeerLink, draft: PostDraft) -> bool:
        """Start a post on a connected link. True: it is over already, so no listener may tell of
        it.
        """
        assert link.handle is not None
        notify = encode_slot_notices(draft.flag_slots) if draft.flag_slots else None
        start = time.monotonic()
        try:
            handle = self._transport.post(link.handle, draft.writes, notify)
        except ValueError as error:
            for share in draft.shares:
                share.ticket.fail(InternalError(f"post to {link.endpoint.peer}: {error}"), start)
            return True
        post_s = time.monotonic() - start
        self.num_bytes += handle.num_bytes
        link.posted(handle.num_bytes, start)
        for share in draft.shares:
            share.ticket.posted(share.num_writes, start, post_s)
        self._posts.append(_Post(link, handle, draft.shares))
        return self._transport.poll(handle) is not TransferState.PENDING

    def settle(self) -> None:
        """Poll all posts; their tickets hear of those that are over."""
        now = time.monotonic()
        posts, self._posts = self._posts, []
        for post in posts:
            # Asked first: what is pending behind the end of its connection was lost track of.
            is_closed = post.link.is_closed
            state = self._transport.poll(post.handle)
            error: TandemError | None = None
            if state is TransferState.PENDING:
                if not is_closed:
                    self._posts.append(post)
                    continue
                peer = post.link.endpoint.peer
                error = InternalError(f"a post to {peer} has outlived its connection")
                _log.error("%s: its bytes are not read any more", error.message)
            else:
                if state is TransferState.FAILED:
                    error = self._transport.error(post.handle) or InternalError("post failed")
                self._transport.release(post.handle)
            self.num_bytes -= post.handle.num_bytes
            post.link.settled(post.handle.num_bytes, now)
            for share in post.shares:
                # A copy each: a ticket adds its request id.
                own = None if error is None else type(error)(error.message)
                share.ticket.settled(share.num_bytes, own, now)

    def forget_all(self) -> None:
        """Lose track of all posts; their connections are closed."""
        self._posts.clear()
        self.num_bytes = 0
