"""The instructions that scalar operations take on a vector unit, and how many of them an expression executes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pallasfuse.ir import dtypes
from pallasfuse.ir.axes import Axis
from pallasfuse.ir.expr import Apply, Const, Expr, postorder

_SIMPLE = 1.0
_INSTRUCTIONS: dict[str, tuple[float, ...]] = {
    "div": (8, 1), "rem": (16, 1, 0, 0, 10), "pow": (24, 2, 0, 66, 28), "atan2": (24, 1, 0, 34, 63), "sqrt": (6, 1),
    "rsqrt": (3, 1), "cbrt": (16, 2, 0, 0, 60), "exp": (2, 1, 7), "exp2": (1, 1), "expm1": (10, 1, 15), "log": (4, 1, 22),
    "log1p": (12, 1, 15), "sin": (12, 1, 0, 30, 10), "cos": (12, 1, 0, 32, 8), "tan": (24, 2, 0, 0, 29),
    "asin": (20, 1, 4, 0, 58), "acos": (20, 1, 6, 0, 65), "atan": (20, 1, 0, 0, 33), "sinh": (12, 2, 0, 16, 4),
    "cosh": (12, 2, 0, 9), "tanh": (8, 2, 7), "asinh": (20, 2, 19), "acosh": (20, 2, 20), "atanh": (16, 2, 19),
    "logistic": (9, 2, 8), "erf": (20, 1), "erfc": (28, 2, 0, 45), "erf_inv": (30, 2, 0, 36), "convert": (0.5, 0),
    "nextafter": (8, 0, 0, 12), "round_away": (4, 0), "round_even": (1, 0, 5), "sign": (3, 0, 4), "integer_pow": (2, 0),
}  # fmt: skip
"""The instructions of one element: (simple ones, those of the special-function unit, further simple ones of the library that a
GPU's compilers call, those of its functions with branches or long sums, clocks of a CPU's core that calls the C library instead);
anything else is one simple instruction.

The third ones are the text that Triton makes of each, counted; the fourth ones are found from the time of eight of them on each of
4 M elements on an H100. The last ones are the time of four on each of 1 M elements on two cores (`benchmarks/scalar_functions.py`).
"""


SPECIAL: dict[str, tuple[float, float]] = {
    "lgamma": (360, 27), "digamma": (700, 34), "bessel_i0e": (130, 9), "bessel_i1e": (130, 7), "polygamma": (3000, 200),
    "zeta": (3300, 220), "igamma": (4900, 330),
}  # fmt: skip
"""Special functions of one element: (instructions of a GPU, clocks of a CPU's core), measured as those of `_INSTRUCTIONS`. Those of
a GPU are measured of the first two; the others are guesses of about fifteen times the clocks."""
LONGEST_SPECIAL = SPECIAL["igamma"]
"""A special function that is not listed is taken for the longest."""


@dataclass(frozen=True, slots=True)
class Operations:
    """Instructions that some expressions execute."""

    simple: float = 0.0
    special: float = 0.0
    library: float = 0.0
    """Further simple instructions, where a GPU's library computes it."""
    branching: float = 0.0
    """Instructions of its functions with branches or long sums, which no emitter approximates."""
    converted: float = 0.0
    """Conversions between integers and floats, which a GPU makes on its special-function unit; booleans are chosen between."""
    called: float = 0.0
    """Clocks of a CPU's core in functions of the C library, which compute one element after the other."""

    @property
    def in_full(self) -> float:
        """Counts simple instructions with those of a library's functions, where nothing is approximated.

        About half of those in branches are executed. (Sines, powers and angles on an H100: 0.4 to 0.65 of them.)
        """
        return self.simple + self.library + 0.5 * self.branching

    def __add__(self, other: "Operations") -> "Operations":
        return Operations(
            self.simple + other.simple, self.special + other.special, self.library + other.library,
            self.branching + other.branching, self.converted + other.converted, self.called + other.called,
        )  # fmt: skip

    def times(self, factor: float) -> "Operations":
        return Operations(
            self.simple * factor, self.special * factor, self.library * factor, self.branching * factor,
            self.converted * factor, self.called * factor,
        )  # fmt: skip


def _of_table(
    simple: float, special: float, library: float = 0.0, branching: float = 0.0, called: float = 0.0
) -> Operations:
    return Operations(simple, special, library, branching, called=called)


_OPERATIONS = {op: _of_table(*counts) for op, counts in _INSTRUCTIONS.items()}
_ONE = Operations(_SIMPLE)


ROUNDED = Operations(0.5, 1.0)
"""A conversion to a half type."""
_CONVERTED = Operations(converted=1.0)


def of_node(node: Apply) -> Operations:
    """The instructions of one operation on one element."""
    if node.op == "div" and isinstance(node.args[1], Const):
        return _ONE
    if node.op == "convert":
        own = ROUNDED if node.dtype in dtypes.HALF else _OPERATIONS["convert"]
        types = node.dtype, node.args[0].dtype
        return own + _CONVERTED if any(map(dtypes.is_integer, types)) and any(map(dtypes.is_float, types)) else own
    found = _OPERATIONS.get(node.op, _ONE)
    return replace(found, called=0.0) if found.called and dtypes.is_integer(node.dtype) else found


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
    simple = special = library = branching = converted = called = 0.0
    for axes, each in instructions:
        times = elements(axes)
        simple += each.simple * times
        special += each.special * times
        library += each.library * times
        branching += each.branching * times
        converted += each.converted * times
        called += each.called * times
    return Operations(simple, special, library, branching, converted, called)


def count(roots: Iterable[Expr], elements: Callable[[frozenset[Axis]], float], seen: set[Expr]) -> Operations:
    """The instructions that `roots` execute, each operation once for every element of its own axes.

    elements: how many elements a tile along some axes has. seen: what has been computed already; grows.
    """
    return executed(new_instructions(postorder(*roots), seen), elements)
