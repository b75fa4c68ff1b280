"""The instructions that scalar operations take on a vector unit, and how many of them an expression executes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, postorder

_SIMPLE = 1.0
_INSTRUCTIONS: dict[str, tuple[float, float]] = {
    "div": (8.0, 1.0), "rem": (16.0, 1.0), "pow": (24.0, 2.0), "atan2": (24.0, 1.0), "sqrt": (6.0, 1.0), "rsqrt": (3.0, 1.0),
    "cbrt": (16.0, 2.0), "exp": (2.0, 1.0), "exp2": (1.0, 1.0), "expm1": (10.0, 1.0), "log": (4.0, 1.0), "log1p": (12.0, 1.0),
    "sin": (12.0, 1.0), "cos": (12.0, 1.0), "tan": (24.0, 2.0), "asin": (20.0, 1.0), "acos": (20.0, 1.0), "atan": (20.0, 1.0),
    "sinh": (12.0, 2.0), "cosh": (12.0, 2.0), "tanh": (8.0, 2.0), "asinh": (20.0, 2.0), "acosh": (20.0, 2.0),
    "atanh": (16.0, 2.0), "logistic": (9.0, 2.0), "erf": (20.0, 1.0), "erfc": (28.0, 2.0), "erf_inv": (30.0, 2.0),
    "convert": (0.5, 0.0), "nextafter": (8.0, 0.0), "round_away": (4.0, 0.0), "sign": (3.0, 0.0), "integer_pow": (2.0, 0.0),
}  # fmt: skip
"""(simple instructions, instructions of the special-function unit) for one element; anything else is one simple instruction."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Instructions that some expressions execute."""

    simple: float = 0.0
    special: float = 0.0

    def __add__(self, other: "Operations") -> "Operations":
        return Operations(self.simple + other.simple, self.special + other.special)

    def times(self, factor: float) -> "Operations":
        return Operations(self.simple * factor, self.special * factor)


_OPERATIONS = {op: Operations(*counts) for op, counts in _INSTRUCTIONS.items()}
_ONE = Operations(_SIMPLE)


ROUNDED = Operations(0.5, 1.0)
"""A conversion to a half type."""


def of_node(node: Apply) -> Operations:
    """The instructions of one operation on one element."""
    if node.op == "div" and isinstance(node.args[1], Const):
        return _ONE
    if node.op == "convert" and node.dtype in ("float16", "bfloat16"):
        return ROUNDED
    return _OPERATIONS.get(node.op, _ONE)


Instructions = tuple[tuple[frozenset[Axis], Operations], ...]
"""Instructions for one element, by the axes of the elements."""


def new_instructions(nodes: Iterable[Expr], seen: set[Expr]) -> Instructions:
    """The instructions of operations, each once. seen: what has been computed already; grows."""
    found: dict[frozenset[Axis], Operations] = {}
    for node in nodes:
        if isinstance(node, Apply) and node not in seen:
            seen.add(node)
            before, own = found.get(node.axes), of_node(node)
            found[node.axes] = own if before is None else before + own
    return tuple(found.items())


def executed(instructions: Instructions, elements: Callable[[frozenset[Axis]], float]) -> Operations:
    """The instructions for all elements. elements: how many there are along some axes."""
    simple = special = 0.0
    for axes, each in instructions:
        times = elements(axes)
        simple += each.simple * times
        special += each.special * times
    return Operations(simple, special)


def count(roots: Iterable[Expr], elements: Callable[[frozenset[Axis]], float], seen: set[Expr]) -> Operations:
    """The instructions that `roots` execute, each operation once for every element of its own axes.

    elements: how many elements a tile along some axes has. seen: what has been computed already; grows.
    """
    return executed(new_instructions(postorder(*roots), seen), elements)
