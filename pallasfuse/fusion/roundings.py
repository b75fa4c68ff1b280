"""Which values may round otherwise where they are computed twice, and on which roundings something depends.

A value that is computed in two kernels has the same last digits in both only where each of its operations rounds in one way. Else
the two may be told apart, by a comparison or by a function that has an edge: `sqrt(max(x) - x)` needs the same `x` on both sides.
"""

from collections.abc import Collection, Iterable

from pallasfuse.ir import dtypes
from pallasfuse.ir.expr import Apply, Expr, Read, postorder
from pallasfuse.ir.loop_program import External, LoopProgram
from pallasfuse.ir.ops import COMPARISONS
from pallasfuse.ir.reducers import PROD, SUM

_SMOOTH = frozenset(
    {"add", "sub", "mul", "neg", "abs", "square", "max", "min", "exp", "exp2", "expm1", "tanh", "logistic", "sin", "cos",
     "erf", "erfc", "atan", "asinh", "sinh", "cosh"}
)  # fmt: skip
"""Functions that change little where their arguments do: rounding decides nothing."""


_OF_ANY_TYPE = COMPARISONS | {"is_finite", "and", "or", "xor", "not", "neg", "abs", "max", "min", "select"}
"""Operations that do not round."""


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


def round_in_one_way(body: Expr, products: Collection[str]) -> bool:
    """Do the operations of a map round to the same value, to the last bit, in every kernel?

    A compiler may join a sum and a product that it sees into one operation with one rounding, and kernels compute in float32 what a
    program rounds to half types. products: the maps that end in a multiplication.
    """

    def is_product(x: Expr) -> bool:
        return x.tensor in products if isinstance(x, Read) else isinstance(x, Apply) and x.op == "mul"

    return all(
        node.op in _OF_ANY_TYPE
        or (node.op in ("add", "sub") and _is_wide(node.dtype) and not any(map(is_product, node.args)))
        or (node.op == "convert" and _is_wide(node.dtype) and not _is_wide(node.args[0].dtype))
        for node in postorder(body)
        if isinstance(node, Apply)
    )


def _is_wide(dtype: str) -> bool:
    return dtypes.is_float(dtype) and dtypes.itemsize_bytes(dtype) >= 4
