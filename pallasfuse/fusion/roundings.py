"""Roundings tell two computations of one value apart; this module finds the values of a program where that matters.

A value that is computed in two kernels has the same last digits in both only where each of its operations rounds in one way. Else
the two may be told apart, by a comparison or by a function that has an edge: `sqrt(max(x) - x)` needs the same `x` on both sides.
"""

from collections.abc import Collection, Iterable

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram
from pallasfuse.ir.ops import COMPARISONS, SHIFTS
from pallasfuse.ir.reducers import PROD, SUM

_SMOOTH = frozenset(
    {"add", "sub", "mul", "neg", "abs", "square", "max", "min", "exp", "exp2", "expm1", "tanh", "logistic", "sin", "cos",
     "erf", "erfc", "atan", "asinh", "sinh", "cosh"}
)  # fmt: skip
"""Functions that change little where their arguments do: rounding decides nothing."""
_OF_ANY_TYPE = (
    COMPARISONS | SHIFTS | {"is_finite", "and", "or", "xor", "not", "neg", "abs", "max", "min", "select", "bitcast"}
)
"""Operations that do not round."""
_PRODUCTS = frozenset({"mul", "square", "integer_pow"})


def decided_by_roundings(program: LoopProgram) -> frozenset[str]:
    """Returns the values on whose last digits something depends: a comparison, a function with an edge, an extreme, an operation
    that XLA alone knows, or whoever gets the program's results.

    Where values were summed up, their last digits mean nothing any more.
    """
    found = set(program.outputs)
    for node in reversed(program.nests):
        if isinstance(node, External):
            found |= node.reads
            continue
        found.update(*(e.tensors for e in looked_at(node.body)))
        if node.reducer not in (None, SUM, PROD) or node.picks or (node.reducer is None and node.name in found):
            found |= node.reads
    return frozenset(found)


def looked_at(body: Expr) -> Iterable[Expr]:
    """Yields the expressions of which a rounding may decide what a body is."""
    for node in postorder(body):
        if not isinstance(node, Apply) or node.op in _SMOOTH:
            continue
        match node.op:
            case "convert":
                if not (dtypes.is_float(node.dtype) and dtypes.is_float(node.args[0].dtype)):
                    yield node
            case "select":
                yield node.args[0]
            case "div":
                yield node.args[1]
            case _:
                yield node


def told_apart(program: LoopProgram) -> frozenset[str]:
    """Returns the maps that a program could tell from themselves, were they computed in two kernels: something depends on their
    roundings, and they have operations that do not round to the same value, to the last bit, everywhere."""
    decided = decided_by_roundings(program)
    products: set[str] = set()
    found: set[str] = set()
    for nest in program.nests:
        if isinstance(nest, External) or nest.is_reduction:
            continue
        if _ends_in_product(nest.body, products):
            products.add(nest.name)
        if nest.name in decided and not _rounds_in_one_way(nest.body, products):
            found.add(nest.name)
    return frozenset(found)


def _rounds_in_one_way(body: Expr, products: Collection[str]) -> bool:
    """Do the operations of a map round to the same value in every kernel?

    A compiler may join a sum and a product that it sees into one operation with one rounding, and kernels compute in float32 what a
    program rounds to half types. products: the maps that end in a multiplication.
    """
    return all(
        node.op in _OF_ANY_TYPE
        or (
            node.op in ("add", "sub")
            and _is_wide(node.dtype)
            and not any(_ends_in_product(a, products) for a in node.args)
        )
        or (node.op == "convert" and _is_wide(node.dtype) and not _is_wide(node.args[0].dtype))
        for node in postorder(body)
        if isinstance(node, Apply)
    )


def _ends_in_product(root: Expr, products: Collection[str]) -> bool:
    """Is a value a product, also with its sign changed or chosen among others? A sum may take it up before it is rounded."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Read) and node.tensor in products:
            return True
        if isinstance(node, Apply):
            if node.op in _PRODUCTS:
                return True
            waiting += node.args if node.op in _OF_ANY_TYPE else ()
    return False


def _is_wide(dtype: str) -> bool:
    return dtypes.is_float(dtype) and dtypes.itemsize_bytes(dtype) >= 4
