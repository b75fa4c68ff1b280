"""What the library computes that XLA hands reductions and their neighbours to, on a CPU."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set

from pallasfuse.ir.axes import Axis, volume
from pallasfuse.ir.expr import Apply, Const, Expr, postorder
from pallasfuse.ir.loop_program import Nest
from pallasfuse.ir.reducers import MAX, MIN, SUM

TYPES = frozenset({"float32", "float64", "bfloat16"})
_OPERATIONS = frozenset({
    "abs", "ceil", "convert", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "logistic", "neg", "round_even", "rsqrt",
    "sign", "sin", "sqrt", "tanh", "tan", "add", "div", "max", "min", "mul", "pow", "sub", "square", "integer_pow",
})  # fmt: skip
"""What it computes element by element: no choices, comparisons or integers."""
_CONVERTED = frozenset({"int8", "uint8"})
"""Types that it converts from and to, besides."""
FEWEST = 4096
"""Elements that an operation reads or makes at least, to be given to the library."""


def takes_reduction(nest: Nest) -> bool:
    """Does the library reduce like that?"""
    return nest.reducer in (SUM, MAX, MIN) and volume((*nest.axes, *nest.reduced)) >= FEWEST


def takes_all(body: Expr, along: frozenset[Axis] | None = None) -> bool:
    """Does the library have every operation of an expression? along: only of those that vary along one of these axes."""
    return all(
        _takes(n) for n in postorder(body) if isinstance(n, Apply) and (along is None or not along.isdisjoint(n.axes))
    )


def _takes(node: Apply) -> bool:
    converts = _CONVERTED if node.op == "convert" else frozenset()
    if node.op not in _OPERATIONS or node.dtype not in TYPES | converts:
        return False
    if any(a.dtype not in TYPES | converts for a in node.args if not isinstance(a, Const)):
        return False
    return all(volume(axes) >= FEWEST for axes in _spaces(node))


def _spaces(node: Apply) -> list[frozenset[Axis]]:
    """The axes of the operations that an operation is: a division by what varies along fewer axes is a product with its inverse."""
    inverse = inverted(node)
    return [node.axes] if inverse is None else [node.axes, inverse.axes]


def inverted(node: Expr) -> Expr | None:
    """The divisor that XLA inverts, since it is the same along some axes of the quotient."""
    if isinstance(node, Apply) and node.op == "div" and not isinstance(node.args[1], Const):
        divisor = node.args[1]
        return divisor if divisor.axes < node.axes else None
    return None


# --- calls: XLA gives the library several operations at once


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
