"""Calls of a CPU's library: XLA gives it several operations at once, as it takes neighbours into a call."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set


def joined_calls[Member: Hashable](
    inner: Sequence[str], maker: Mapping[str, Member], readers: Mapping[str, Set[Member]]
) -> Callable[[Member], Member]:
    """Returns the function that names the call an operation is in, after one of those in the call.

    A call takes what makes an operand if all that read the operand are in the call. inner: the tensors that a call may keep
    inside, the last ones first.
    """
    above: dict[Member, Member] = {}

    def call(member: Member) -> Member:
        while (up := above.get(member, member)) != member:
            above[member] = member = above.get(up, up)
        return member

    changed = True
    while changed:
        changed = False
        for name in inner:
            calls = {call(r) for r in readers[name]}
            at = call(maker[name])
            if len(calls) == 1 and at not in calls:
                above[at] = calls.pop()
                changed = True
    return call
