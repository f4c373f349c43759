"""Who is at this rank, as the event loop knows it: so Reserve is answered without the engine loop.

A place is taken before the engine loop hears of a request, and given back once the news of its end
have left it. So an id comes free only when nothing of the former request can follow.
"""

from __future__ import annotations

from runtime.errors import InvalidRequestError, OverloadedError


class Places:
    """Ids of all requests between Reserve and their last news. Used on the event loop only."""

    def __init__(self, max_num_reserved: int) -> None:
        """`max_num_reserved`: most requests at a time."""
        self._max = max_num_reserved
        self._taken: set[str] = set()

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, request_id: str) -> None:
        """Take a place.

        Raises:
            InvalidRequestError: the id is in use.
            OverloadedError: there is none left.
        """
        if request_id in self._taken:
            raise InvalidRequestError(f"request id {request_id} is in use")
        if len(self._taken) >= self._max:
            raise OverloadedError(
                f"{len(self._taken)} requests are here already (decode.max_num_reserved): retry "
                "later"
            )
        self._taken.add(request_id)

    def give_back(self, request_id: str) -> None:
        """The request is over; nothing happens where it has no place."""
        self._taken.discard(request_id)
