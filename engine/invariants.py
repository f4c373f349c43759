"""What memory depends on: checked always, also where Python runs without its assertions.

A kernel addresses memory by the sizes that it is told. A wrong one, or a transfer out of turn, does
not fail: it reads or writes the numbers of another request. So whoever launches asks `require`
first, and `assert` is for what cannot corrupt anything.
"""

from runtime.errors import InternalError


def require(holds: bool, subject: str, value: object, rule: str) -> None:
    """Go on if an invariant holds.

    Args:
        holds: whether it does; known to the host, never read off a device.
        subject: whose it is, for the message.
        value: what was given.
        rule: what is wanted.

    Raises:
        InternalError: it does not. The step must end: its numbers would be wrong.
    """
    if not holds:
        raise InternalError(f"{subject}: {value} was given; {rule}")


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
