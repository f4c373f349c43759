"""The short way of tokens that are text and nothing else, from an id to the bytes of its event.

Nearly every token of most streams is such, so nothing is made for it but its event: no output, no
piece, no call of its own in the event loop. What else happens to a choice (its first token, its
end, log-probabilities, tools, a character in two tokens) goes through the mailbox, as do tokens
while anything waits there or the client has no room.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.http.openai.response import Choice
from router.http.wire.outlet import Outlet
from router.http.wire.sse import TextEvent
from router.metrics.tally import DeliveryTally


class TextFlow:
    """Of one choice of a stream."""

    __slots__ = (
        "_around",
        "_choice_text",
        "_connection",
        "_deliveries",
        "_index",
        "_last_delivery",
        "_send",
    )

    def __init__(
        self,
        choice: Choice,
        event: TextEvent,
        outlet: Outlet,
        deliveries: DeliveryTally,
        last_delivery: list[float],
    ) -> None:
        """``event`` is filled with each text; ``last_delivery`` has a moment for every choice."""
        self._choice_text = choice.text
        self._index = choice.index
        self._around = event.around_text
        self._connection = outlet.connection
        self._send = outlet.connection.outbox.add
        self._deliveries = deliveries
        self._last_delivery = last_delivery

    def take(self, token_id: int, now: float) -> bool:
        """Send one token, which comes ``now``; whether that was possible."""
        pieces = self._choice_text.json_pieces
        if pieces is None or not self._connection.has_room:
            return False
        said = pieces[token_id]
        if said is None:
            return False
        self._say(said, 1, now)
        return True

    def take_all(self, token_ids: Sequence[int], now: float) -> bool:
        """Send several that came together, as one event; whether that was possible."""
        pieces = self._choice_text.json_pieces
        if pieces is None or not self._connection.has_room:
            return False
        said = [part for token_id in token_ids if (part := pieces[token_id]) is not None]
        if len(said) < len(token_ids):
            return False
        self._say(b"".join(said), len(said), now)
        return True

    def _say(self, said: bytes, num_tokens: int, now: float) -> None:
        self._choice_text.num_tokens += num_tokens
        last_delivery, index = self._last_delivery, self._index
        self._deliveries.add(num_tokens, now - last_delivery[index])
        last_delivery[index] = now
        before, after = self._around
        self._send(self._connection, before + said + after)
