"""The order of transfers through one buffer: a sending follows the receiving before it."""

from engine.invariants import require


def require_in_turn(what: str, under_way: str) -> None:
    """Check that no transfer is under way when another one starts.

    A buffer's halves are used in turns: out of turn, a sending overwrites what a peer still reads.

    Args:
        what: starts, "dispatch" or "combine".
        under_way: was sent and is not received yet; empty if nothing is.

    Raises:
        InternalError: one is.
    """
    require(
        not under_way,
        f"start of a {what}",
        f"a buffer whose {under_way} was not received",
        "it must be received first",
    )
