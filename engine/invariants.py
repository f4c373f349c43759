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
